"""Norms of whole sharded tensors, as numbers that are the same on every rank, with few reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdmoe.fsdp.shard_layout import ShardLayout


def global_norms(
    pieces: Sequence[torch.Tensor],
    layouts: Sequence[ShardLayout],
    ord: float,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """The norm of each global tensor, as plain scalars on every rank.

    Collective over the axes that a tensor is spread over, once for all tensors that are spread over the same.
    """
    together: dict[tuple[object, ...], list[int]] = {}
    for index, (piece, layout) in enumerate(zip(pieces, layouts, strict=True)):
        key = (id(layout.meshes), *layout.reduction_axes(), piece.dtype, piece.device)
        together.setdefault(key, []).append(index)
    norms: list[torch.Tensor | None] = [None] * len(pieces)
    for indices in together.values():
        layout, kind = layouts[indices[0]], pieces[indices[0]].dtype
        accumulate = dtype or (torch.float32 if kind.itemsize < 4 else kind)
        powers = torch.stack([_power(pieces[index], ord, accumulate) for index in indices])
        for axis in layout.reduction_axes():
            dist.all_reduce(powers, _reduction(ord), group=layout.meshes.group(axis))
        totals = powers if math.isinf(ord) or ord == 0 else powers.pow(1.0 / ord)
        for index, total in zip(indices, totals.to(dtype or kind).unbind(), strict=True):
            norms[index] = total
    return norms  # type: ignore[return-value]


def _power(piece: torch.Tensor, ord: float, dtype: torch.dtype) -> torch.Tensor:
    """What adds up to the norm (or has it as its extreme)."""
    if math.isinf(ord) and not piece.numel():
        return torch.full((), 0.0 if ord > 0 else math.inf, dtype=dtype, device=piece.device)
    norm = torch.linalg.vector_norm(piece, ord, dtype=dtype)
    return norm if math.isinf(ord) or ord == 0 else norm.pow(ord)


def _reduction(ord: float) -> dist.ReduceOp.RedOpType:
    if math.isinf(ord):
        return dist.ReduceOp.MAX if ord > 0 else dist.ReduceOp.MIN
    return dist.ReduceOp.SUM
