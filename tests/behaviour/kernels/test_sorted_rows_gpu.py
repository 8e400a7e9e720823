"""Experts that keep sorted rows for backward, next to float64 and to experts that lay them out again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import build_row_map
from fsdmoe.testing import requires_gpu

E, K = 16, 4
NAMES = ("y", "x", "weights", "gate_up", "down")


def draw(num_rows: int, d: int, n: int) -> tuple[list[Tensor], Tensor]:
    """Leaves (x, routing weights, weights) and ids: a few not here, one expert without rows."""
    random = torch.Generator("cuda").manual_seed(num_rows + d)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda").mul_(scale).bfloat16()

    ids = torch.rand(num_rows, E - 1, generator=random, device="cuda").argsort(1)[:, :K].contiguous()
    ids[torch.rand(ids.shape, generator=random, device="cuda") > 0.8] = -1
    weights = torch.rand(num_rows, K, generator=random, device="cuda")
    leaves = [
        normal(num_rows, d), weights, normal(E, 2 * n, d, scale=d**-0.5), normal(E, d, n, scale=n**-0.5)
    ]  # fmt: skip
    return leaves, ids


def computed(function, policy: ExpertPolicy, leaves: list[Tensor], ids: Tensor, dtype=None) -> list[Tensor]:
    given = [leaf.detach().to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
    x, weights, *both = given
    y = function(Rows(x, weights, ids), ExpertWeights(*both), policy)
    dy = torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


@requires_gpu
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize(("num_rows", "d", "n"), [(2000, 1152, 384), (2000, 256, 192), (150, 128, 64)])
def test_kept_rows_are_as_near_to_float64_as_rows_laid_out_again(
    num_rows: int, d: int, n: int, activation: str
) -> None:
    leaves, ids = draw(num_rows, d, n)
    exact = computed(experts_mlp_reference, ExpertPolicy(activation), leaves, ids, torch.float64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept, again = (
            computed(experts_mlp, ExpertPolicy(activation, keeps_rows=keeps), leaves, ids)
            for keeps in (True, False)
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, ours, theirs, wanted in zip(NAMES, kept, again, exact, strict=True):
        mine, before = ((found.double() - wanted).norm() / wanted.norm() for found in (ours, theirs))
        assert mine < 1e-2, f"{name} is off by {mine:.1e}"
        assert mine <= 1.05 * before, f"{name}: {mine:.1e}, {before:.1e} without"


@requires_gpu
@pytest.mark.parametrize("d", [64, 136, 384, 1152, 2048, 2880])
def test_rows_of_any_width_go_to_their_experts_and_back(d: int) -> None:
    leaves, ids = draw(700, d, 64)
    x, cleared = leaves[0], torch.ones(ids.shape, device="cuda")
    row_map = build_row_map(ids, E, align=128)
    sorted_MD = permute_rows(x, row_map, clear_RK=cleared)
    end = int(row_map.offsets[E])
    source_M = row_map.source_M[:end].long()
    rows_MD = torch.where((source_M >= 0)[:, None], x[source_M.clamp(min=0) // K], 0.0)
    assert torch.equal(sorted_MD[:end], rows_MD)
    assert torch.equal(cleared, (ids >= 0).float())
    times = (ids >= 0).sum(1, keepdim=True)
    assert torch.equal(combine_rows(sorted_MD, row_map), (x.float() * times).bfloat16())
