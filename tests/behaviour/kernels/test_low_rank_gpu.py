"""Low-rank updates of experts in the fused kernels, next to float64 and to plain grouped products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels.expert_mlp import ExpertFunction, experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.testing import requires_gpu
from tests.support.experts_by_products import experts_mlp_grouped

E, D, N, K = 16, 256, 192, 4
NAMES = ("y", "x", "weights", "gate_up_a", "gate_up_b", "down_a", "down_b")


def draw(num_rows: int, rank: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Leaves (x, weights, factors), ids (a few not here, one expert without rows), frozen weights."""
    random = torch.Generator("cuda").manual_seed(num_rows + rank)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda").mul_(scale).bfloat16()

    ids = torch.rand(num_rows, E - 1, generator=random, device="cuda").argsort(1)[:, :K]
    ids[torch.rand(ids.shape, generator=random, device="cuda") > 0.8] = -1
    weights = torch.rand(num_rows, K, generator=random, device="cuda")
    shapes = ((rank, D), (2 * N, rank), (rank, N), (D, rank))
    factors = [normal(E, *shape, scale=shape[1] ** -0.5) for shape in shapes]
    frozen = [normal(E, 2 * N, D, scale=D**-0.5), normal(E, D, N, scale=N**-0.5)]
    return [normal(num_rows, D), weights, *factors], ids, frozen


def computed(
    function: ExpertFunction,
    policy: ExpertPolicy,
    drawn: tuple[list[Tensor], Tensor, list[Tensor]],
    dtype=None,
) -> list[Tensor]:
    leaves, ids, frozen = drawn
    x, weights, *factors = [leaf.detach().to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
    base = ExpertWeights(*[each.to(dtype or each.dtype) for each in frozen])
    y = function(Rows(x, weights, ids), base, policy, None, LowRankUpdates(*factors))
    dy = torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *factors], dy)]


@requires_gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "rank"), [(2000, 8), (150, 8), (2000, 32), (2000, 64), (900, 128), (900, 256)]
)
def test_fused_updates_are_as_near_to_float64_as_plain_products(
    num_rows: int, rank: int, recompute: bool
) -> None:
    drawn, policy = draw(num_rows, rank), ExpertPolicy(recompute=recompute)
    exact = computed(experts_mlp_reference, ExpertPolicy(), drawn, torch.float64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = computed(experts_mlp, policy, drawn)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = computed(experts_mlp_grouped, policy, drawn)
    for name, ours, theirs, right in zip(NAMES, found, plain, exact, strict=True):
        error, allowed = ((each.double() - right).norm() / right.norm() for each in (ours, theirs))
        assert error <= 1.3 * allowed + 1e-5, f"{name} is off by {error:.1e}, plain products by {allowed:.1e}"


@requires_gpu
def test_updates_are_computed_by_the_fused_kernels() -> None:
    drawn = draw(500, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        computed(experts_mlp, ExpertPolicy(), drawn)
    names = {event.key for event in profile.key_averages()}
    assert {"_gate_up_kernel", "_project_kernel", "_weight_grad_kernel"} <= names
