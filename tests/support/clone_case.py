"""Loads of experts, from even to all rows for one, and what a plan of clones makes of them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fsdmoe.kernels.clone_plan import ClonePlan

SHAPES = [(2, 22, 1), (4, 8, 2), (8, 128, 2), (3, 12, 2), (6, 6, 3), (1, 4, 2), (64, 256, 2)]
"""Ranks, experts, slots."""


def draw_counts(num_ranks: int, num_experts: int, seed: int) -> Tensor:
    """Rows that each rank has for each expert: seeds take turns with kinds of loads."""
    random = torch.Generator().manual_seed(seed)
    counts_PE = torch.randint(0, 200, (num_ranks, num_experts), generator=random)
    kind = seed % 5
    if kind == 1:  # skewed, more and more
        skew_E = (torch.randn(num_experts, generator=random) * (1 + seed % 4) / 2).exp()
        counts_PE = (counts_PE * skew_E).long()
    elif kind == 2:  # all rows for one expert
        one = int(torch.randint(num_experts, (1,), generator=random))
        counts_PE[:, :one] = 0
        counts_PE[:, one + 1 :] = 0
    elif kind == 3:  # a rank without rows, and experts without any
        counts_PE[seed % num_ranks] = 0
        counts_PE[:, ::3] = 0
    elif kind == 4:  # equal numbers, which have to be told apart by their order
        counts_PE = counts_PE // 100 * 100
    return counts_PE.int()


def _pieces(plan: ClonePlan, num_experts: int) -> list[tuple[int, int, int, int]]:
    """Expert, rank, slot there and rows of each piece that has any."""
    num_ranks, num_slots = plan.experts_PS.shape
    per_rank = num_experts // num_ranks
    ends = [0, *plan.ends_F.tolist()]
    found = []
    for (start, end), place in zip(pairwise(ends), plan.places_F.tolist(), strict=True):
        rank, slot = divmod(place, per_rank + num_slots)
        expert = rank * per_rank + slot if slot < per_rank else int(plan.experts_PS[rank, slot - per_rank])
        assert end >= start
        if end > start:
            found.append((expert, rank, slot, end - start))
    return found


def moved_rows(plan: ClonePlan, num_experts: int) -> Tensor:
    """Rows of each expert that go to a clone on each rank."""
    num_ranks = len(plan.experts_PS)
    moved_EP = torch.zeros(num_experts, num_ranks, dtype=torch.int64)
    for expert, rank, slot, rows in _pieces(plan, num_experts):
        moved_EP[expert, rank] += rows * (slot >= num_experts // num_ranks)
    return moved_EP


def rows_by_rank(plan: ClonePlan, num_experts: int) -> Tensor:
    """Rows that each rank computes."""
    rows_P = torch.zeros(len(plan.experts_PS), dtype=torch.int64)
    for _, rank, _, rows in _pieces(plan, num_experts):
        rows_P[rank] += rows
    return rows_P
