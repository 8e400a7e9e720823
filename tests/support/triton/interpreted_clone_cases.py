"""The kernel that plans clones, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.clone_plan import plan_clones
from fsdmoe.kernels.triton import clone_plan_kernel
from tests.support.clone_case import SHAPES, draw_counts

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("num_ranks", "num_experts", "num_slots"), SHAPES, ids=str)
def test_clones_are_planned_as_in_plain_torch(
    num_ranks: int, num_experts: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone_plan_kernel, "_BLOCK", 4 if num_experts < 100 else 32)
    for seed in range(10):
        counts_PE = draw_counts(num_ranks, num_experts, seed)
        least_rows = seed % 3 * 20
        wanted = plan_clones(counts_PE, num_slots, least_rows)
        with kernels("triton"):
            found = plan_clones(counts_PE, num_slots, least_rows)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs), seed
