"""The plan of clones on a GPU: bitwise that of the host, without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.clone_plan import place_choices, plan_clones
from fsdmoe.kernels.permute import group_assignments
from fsdmoe.testing import requires_gpu
from tests.support.clone_case import SHAPES, draw_counts


@requires_gpu
@pytest.mark.parametrize(("num_ranks", "num_experts", "num_slots"), SHAPES, ids=str)
def test_clones_are_planned_as_on_the_host(num_ranks: int, num_experts: int, num_slots: int) -> None:
    for seed in range(1500):
        counts_PE = draw_counts(num_ranks, num_experts, seed)
        wanted = plan_clones(counts_PE, num_slots, seed % 3 * 20)
        found = plan_clones(counts_PE.cuda(), num_slots, seed % 3 * 20)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine.cpu(), theirs), seed


@requires_gpu
def test_no_host_waits_for_a_plan() -> None:
    ids_TK = torch.randint(-1, 64, (1000, 4)).cuda()
    counts_PE = draw_counts(8, 64, 1).cuda()

    def plan() -> torch.Tensor:
        permutation = group_assignments(ids_TK, 64)
        ends_G = permutation.ends_G
        counts_PE[3] = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
        return place_choices(ids_TK, permutation, counts_PE, plan_clones(counts_PE, 2, 100), 3)

    plan()
    torch.cuda.set_sync_debug_mode("error")
    try:
        placed_TK = plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(placed_TK < 0, ids_TK < 0)
