"""Heads for tokens: the all-to-all of Ulysses-style attention, grouped key-value heads included.

Before attention every rank holds all heads of its own tokens; after the exchange it holds all tokens of its
own heads, so attention needs nothing more; a second exchange brings the output back. Query head ``h`` reads
key-value head ``h // J`` (J query heads a group), so a rank that computes H / R query heads needs some of the
G key-value heads:

    G a multiple of R    groups are split like the query heads              H 8, G 4, R 2:   0 1 | 2 3
    R a multiple of G    R / G ranks share a group, which each is sent      H 8, G 2, R 4:   0 | 0 | 1 | 1
    neither              a key-value head is sent for each query head       H 6, G 2, R 3:   0 0 | 0 1 | 1 1

Queries, keys and values go in one all-to-all.

Shape suffixes: R ranks, T tokens of one rank, H and G query and key-value heads of all ranks, h and g those
of one rank, D and E widths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.context_parallel.config import heads_of_ranks


def scatter_heads(
    q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens, rank after rank, of this rank's heads: ``[RT, h, D]``, ``[RT, g, D]``, ``[RT, g, E]``."""
    size = dist.get_world_size(group)
    num_sent = size * len(heads_of_ranks(q_THD.shape[1], k_TGD.shape[1], size)[0])
    # Rank after rank, the heads wanted are all heads in order, each as often as the others.
    repeats = num_sent // k_TGD.shape[1]
    k, v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k_TGD, v_TGE))
    for_ranks = [x.unflatten(1, (size, -1)).transpose(0, 1) for x in (q_THD, k, v)]
    packed_RTC = torch.cat([x.flatten(2) for x in for_ranks], dim=2)
    arrived = _Exchange.apply(packed_RTC, group).flatten(0, 1)
    widths = [x.shape[2] * x.shape[3] for x in for_ranks]
    q, k, v = (
        part.unflatten(1, x.shape[2:])
        for part, x in zip(arrived.split(widths, dim=1), for_ranks, strict=True)
    )
    return q, k, v


def gather_heads(out_ShE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse for the output: all heads ``[T, H, E]`` of this rank's own tokens."""
    size = dist.get_world_size(group)
    arrived_RThE = _Exchange.apply(out_ShE.unflatten(0, (size, -1)), group)
    return arrived_RThE.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """``x[r]`` goes to rank ``r``; the transpose of that is the same exchange again. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x_R, group)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad_R, ctx.group), None


def _all_to_all(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    contiguous = x_R.contiguous()
    arrived = torch.empty_like(contiguous)
    dist.all_to_all_single(arrived, contiguous, group=group)
    return arrived
