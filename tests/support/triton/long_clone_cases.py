"""Thousands of plans of clones, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.clone_plan import plan_clones
from tests.support.clone_case import SHAPES, draw_counts


@pytest.mark.parametrize(("num_ranks", "num_experts", "num_slots"), SHAPES, ids=str)
def test_many_plans_are_those_of_plain_torch(num_ranks: int, num_experts: int, num_slots: int) -> None:
    for seed in range(500):
        counts_PE = draw_counts(num_ranks, num_experts, seed)
        wanted = plan_clones(counts_PE, num_slots, seed % 3 * 20)
        with kernels("triton"):
            found = plan_clones(counts_PE, num_slots, seed % 3 * 20)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs), seed
