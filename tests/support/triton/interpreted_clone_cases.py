"""The kernel that plans clones, and those that compute them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.clone_plan import plan_clones
from fsdmoe.kernels.cloned_products import ClonedProducts
from fsdmoe.kernels.expert_autograd import compute_experts
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.kernels.triton import clone_plan_kernel
from fsdmoe.kernels.triton.swiglu_mlp import FusedProducts
from tests.support.clone_case import SHAPES, draw_counts

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("num_ranks", "num_experts", "num_slots"), SHAPES, ids=str)
def test_clones_are_planned_as_in_plain_torch(
    num_ranks: int, num_experts: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone_plan_kernel, "_BLOCK", 4 if num_experts < 100 else 32)
    for seed in range(5):  # each kind of loads
        counts_PE = draw_counts(num_ranks, num_experts, seed)
        least_rows = seed % 3 * 20
        wanted = plan_clones(counts_PE, num_slots, least_rows)
        with kernels("triton"):
            found = plan_clones(counts_PE, num_slots, least_rows)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs), seed


class Clones:
    """Of two experts, which lie behind a rank's own."""

    def __init__(self, joined: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.grads = [torch.full_like(weight[-2:], torch.nan) for weight in joined]
        self._joined = joined
        self.num_used = 0

    def joined_again(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._joined

    def used(self) -> None:
        self.num_used += 1

    def grad_place(self, number: int) -> tuple[torch.Tensor, bool]:
        return self.grads[number], False


def test_own_experts_and_clones_in_one_call_have_the_gradients_of_that_many_experts() -> None:
    generator = torch.Generator().manual_seed(1)
    num_experts, d, n, num_rows = 5, 32, 16, 40
    gate_up = torch.randn(num_experts, 2 * n, d, generator=generator)
    down = torch.randn(num_experts, d, n, generator=generator)
    x_RD = torch.randn(num_rows, d, generator=generator)
    weights_RK = torch.rand(num_rows, 2, generator=generator)
    ids_RK = torch.randint(-1, num_experts, (num_rows, 2), generator=generator)
    dy_RD = torch.randn(num_rows, d, generator=generator)
    whole = [each.clone().requires_grad_() for each in (x_RD, weights_RK, gate_up, down)]
    wanted = experts_mlp_reference(Rows(whole[0], whole[1], ids_RK), ExpertWeights(*whole[2:]))
    wanted.backward(dy_RD)

    clones = Clones((gate_up, down))
    own = [each.clone().requires_grad_() for each in (x_RD, weights_RK, gate_up[:3], down[:3])]
    products = ClonedProducts(FusedProducts(), clones, [gate_up, down])
    found = compute_experts(products, Rows(own[0], own[1], ids_RK), ExpertWeights(*own[2:]))
    found.backward(dy_RD)
    assert clones.num_used == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(own, whole, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad[: len(mine)], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(clones.grads, whole[2:], strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine, theirs.grad[3:], rtol=1e-4, atol=1e-4)
