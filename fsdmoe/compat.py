"""Collectives that torch 2.13 renamed: it warns about the old names, and 2.11 has no others."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather(
    out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Every rank's ``own`` into ``out``; ``own`` may be this rank's slice of ``out``."""
    if out.dtype.itemsize == 1:  # float8, which gloo does not know
        out, own = out.view(torch.uint8), own.view(torch.uint8)
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(out, own, group=group, async_op=async_op)


def reduce_scatter(
    out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """The sum of every rank's ``full``, this rank's slice of it."""
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return run(out, full, group=group, async_op=async_op)
