"""Which experts are cloned to which ranks, and which rows go to a clone: a function of everybody's counts.

Every EP rank owns L experts and has S spare slots. What ranks have above the mean is laid on one line, the
largest piece first, and what the others have below it on another; where the two overlap, a clone takes over::

    above the mean    |---- expert 3 ----|-- expert 9 --|- 4 -|
    below the mean    |-- rank 5 --|--- rank 2 ---|- rank 7 -|
    clones             3 on 5, 3 on 2, 9 on 2, 9 on 7, 4 on 7

A rank takes over at most S pieces, the largest, each of more than ``least_rows`` rows. Rows of an expert are
counted by source rank, then in the order of tokens: the first stay at home, the next go to the clone on the
first rank that has one, and so on. All of it is integers, so every rank finds the same plan.

Experts are *placed*: with clones, rank ``p`` has the ids ``p (L + S)`` to ``(p + 1) (L + S) - 1``, its own
experts first, then its clones in the order of their experts.

Sizes: P EP ranks, E experts, S slots; F = E + P S pieces (an expert at home, then its clones by rank; those
of free slots come last).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.permute import RowPermutation


class ClonePlan(NamedTuple):
    """Tensors of int32, the same on all ranks."""

    experts_PS: Tensor
    """The expert in each slot, in ascending order; E in those that are free, which come last."""
    ends_F: Tensor
    """Where each piece ends if the rows of all experts stand one after the other."""
    places_F: Tensor
    """The placed id of each piece; of no account where it has no rows."""

    @property
    def num_experts(self) -> int:
        return len(self.ends_F) - self.experts_PS.numel()


def plan_clones(counts_PE: Tensor, num_slots: int, least_rows: int) -> ClonePlan:
    """From the rows that each rank has for each expert, int32. Nothing waits for the device."""
    fused = triton_for(counts_PE)
    if fused is not None:
        return ClonePlan(*fused.plan_clones_triton(counts_PE, num_slots, least_rows))
    num_ranks, num_experts = counts_PE.shape
    per_rank = num_experts // num_ranks
    rows_E = counts_PE.sum(0)
    moved_EP = _overlaps(rows_E, num_ranks, least_rows)
    rows_SP, experts_SP = moved_EP.sort(dim=0, descending=True, stable=True)
    rows_SP = F.pad(rows_SP[:num_slots], (0, 0, 0, max(0, num_slots - num_experts)))
    experts_SP = F.pad(experts_SP[:num_slots], (0, 0, 0, max(0, num_slots - num_experts)))
    experts_PS, order_PS = experts_SP.masked_fill(rows_SP == 0, num_experts).t().sort(dim=1, stable=True)
    rows_PS = rows_SP.t().gather(1, order_PS)

    numbers_E = torch.arange(num_experts, device=counts_PE.device)
    slots_PS = torch.arange(num_ranks * num_slots, device=counts_PE.device)
    kept_E = rows_E.index_add(0, experts_PS.clamp(max=num_experts - 1).flatten(), -rows_PS.flatten())
    stride = num_ranks * num_slots + 1
    order_F = torch.cat((numbers_E * stride, experts_PS.flatten() * stride + 1 + slots_PS)).argsort()
    places = (
        numbers_E + numbers_E // per_rank * num_slots,
        slots_PS + (slots_PS // num_slots + 1) * per_rank,
    )
    ends_F = torch.cat((kept_E, rows_PS.flatten()))[order_F].cumsum(0)
    return ClonePlan(experts_PS.int(), ends_F.int(), torch.cat(places)[order_F].int())


def _overlaps(rows_E: Tensor, num_ranks: int, least_rows: int) -> Tensor:
    """``moved_EP``: rows of each expert that each rank could take over; see the module's drawing."""
    rows_PL = rows_E.view(num_ranks, -1)
    rows_P1 = rows_PL.sum(1, keepdim=True)
    mean = (rows_E.sum() + num_ranks - 1) // num_ranks
    above_PL = rows_P1 - mean - _larger_before(rows_PL)
    spill_E = torch.minimum(above_PL.clamp(min=0), rows_PL).flatten()
    spill_E = spill_E.masked_fill(spill_E <= least_rows, 0)
    spare_P = (mean - rows_P1).clamp(min=0).flatten()
    first_E1 = _larger_before(spill_E).unsqueeze(1)
    first_P = _larger_before(spare_P)
    ends_EP = torch.minimum(first_E1 + spill_E.unsqueeze(1), first_P + spare_P)
    moved_EP = (ends_EP - torch.maximum(first_E1, first_P)).clamp(min=0)
    return moved_EP.masked_fill(moved_EP <= least_rows, 0)


def _larger_before(values: Tensor) -> Tensor:
    """For each number of the last dim the sum of those that are larger, or equal and come before it."""
    mine = values.unsqueeze(-1)
    other = values.unsqueeze(-2)
    before = torch.ones(other.shape[-1], other.shape[-1], dtype=torch.bool, device=values.device).tril(-1)
    return torch.where((other > mine) | ((other == mine) & before), other, 0).sum(-1)


def place_choices(
    ids_TK: Tensor, permutation: RowPermutation, counts_PE: Tensor, plan: ClonePlan, source: int
) -> Tensor:
    """``ids_TK`` of rank ``source`` as placed ids, int32; -1 stays. ``permutation``: of them by expert."""
    rows_E = counts_PE.sum(0)
    before_E = rows_E.cumsum(0) - rows_E + counts_PE[:source].sum(0)  # in the order of all ranks' rows
    own_E = permutation.ends_G - counts_PE[source]  # in this rank's order
    shift_E = (before_E - own_E).int()
    rows_TK = permutation.slots_RK + shift_E[ids_TK.clamp(min=0).long()]
    pieces_TK = torch.searchsorted(plan.ends_F, rows_TK, right=True)
    # What goes nowhere may be found past the last piece.
    placed_TK = plan.places_F[pieces_TK.clamp(max=len(plan.ends_F) - 1)]
    return placed_TK.masked_fill(ids_TK < 0, -1)
