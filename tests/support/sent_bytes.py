"""Bytes that a rank sends, counted where they are handed to torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class SentBytes:
    """Counts what leaves this rank through the functions of torch.distributed that attention uses."""

    def __init__(self) -> None:
        self.total = 0

    def __enter__(self) -> SentBytes:
        others = dist.get_world_size() - 1
        bytes_of = {
            "batch_isend_irecv": lambda ops: sum(op.tensor.nbytes for op in ops if op.op is dist.isend),
            "all_to_all_single": lambda out, x, *splits: x.nbytes * others // (others + 1),
            "all_gather_into_tensor": lambda out, x: x.nbytes * others,
            "all_gather_single": lambda out, x: x.nbytes * others,
            "reduce_scatter_tensor": lambda out, x: out.nbytes * others,
            "reduce_scatter_single": lambda out, x: out.nbytes * others,
        }
        self.real = {name: getattr(dist, name) for name in bytes_of if hasattr(dist, name)}
        for name in self.real:
            setattr(dist, name, self._counted(name, bytes_of[name]))
        return self

    def _counted(self, name: str, bytes_of: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.total += bytes_of(*args)
            return self.real[name](*args, **kwargs)

        return call

    def __exit__(self, *exc: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)


def tensor_parallel_elements(batch: int, seq_len: int, hidden: int, size: int) -> float:
    """MegaScale-MoE equation (1): what one forward of tensor-parallel attention sends, in elements."""
    return 2 * batch * seq_len * hidden * (size - 1) / size


def sequence_parallel_elements(
    batch: int, seq_len: int, hidden: int, size: int, heads_per_group: float
) -> float:
    """MegaScale-MoE equation (2): forward and backward of all-to-all attention, in elements."""
    return tensor_parallel_elements(batch, seq_len, hidden, size) * (2 + 2 / heads_per_group) / size
