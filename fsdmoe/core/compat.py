"""Collectives that torch 2.13 renamed: it warns about the old names, and 2.11 has no others."""

from __future__ import annotations

import torch
import torch.distributed as dist

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""Names in ``torch.distributed``."""


def all_gather(
    out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Every rank's ``own`` into ``out``; ``own`` may be this rank's slice of ``out``. gloo knows no float8:
    view it as bytes."""
    return getattr(dist, ALL_GATHER)(out, own, group=group, async_op=async_op)


def reduce_scatter(
    out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """The sum of every rank's ``full``, this rank's slice of it."""
    return getattr(dist, REDUCE_SCATTER)(out, full, group=group, async_op=async_op)
