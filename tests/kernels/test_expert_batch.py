"""All experts at once are one expert after the other: the same values in every recipe, whatever is padded."""

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels import expert_emulated
from fsdmoe.kernels.expert_batch import LONG, ranges_of
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.precision.recipes import RECIPES, build_recipe

EXPERTS, HIDDEN, WIDTH = 4, 48, 32


def run(rows: Rows, parameters: list[Tensor], policy: ExpertPolicy) -> list[Tensor]:
    x, weights_RK, ids_RK = rows
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, weights_RK, *parameters)]
    torch.manual_seed(0)  # what is rounded by chance
    assert policy.recipe is not None
    y = experts_mlp_quantized(
        Rows(leaves[0], leaves[1], ids_RK), ExpertWeights(*leaves[2:]), policy, policy.recipe
    )
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("weight_after", [False, True])
@pytest.mark.parametrize("name", [name for name in RECIPES[1:] if name != "nvfp4"])
def test_all_at_once_equal_one_after_the_other(
    name: str, weight_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    ids = torch.rand(150, EXPERTS).argsort(1)[:, :2]
    ids[::7, 1] = -1
    ids[ids == 3] = 1  # one expert has no rows
    rows = Rows(torch.randn(150, HIDDEN), torch.rand(150, 2), ids)
    parameters = [torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 7, torch.randn(EXPERTS, HIDDEN, WIDTH) / 6,
                  torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)]  # fmt: skip
    rows.x_RD[:, 0] = 1
    parameters[0][:, :WIDTH, 0], parameters[2][:, :WIDTH] = -9, 9  # in padding alone gates would be large
    recipe = build_recipe(name)  # type: ignore[arg-type]
    policy = ExpertPolicy(recipe=recipe, weight_after=weight_after)
    assert ranges_of(ids, EXPERTS) is not None
    found = run(rows, parameters, policy)
    monkeypatch.setattr(expert_emulated, "ranges_of", lambda *_: None)
    for one, other in zip(found, run(rows, parameters, policy), strict=True):
        # A product whose last bit differs by the order of its sum may fall on the next code.
        assert (one - other).norm() <= 2e-3 * other.norm()


def test_rounding_by_chance_sees_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randn(64, HIDDEN), torch.rand(64, 1), torch.randint(EXPERTS, (64, 1)))
    parameters = [torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 7, torch.randn(EXPERTS, HIDDEN, WIDTH) / 6]
    policy = ExpertPolicy(recipe=build_recipe("nvfp4"))
    found = run(rows, parameters, policy)
    monkeypatch.setattr(expert_emulated, "ranges_of", lambda *_: None)
    exact = run(rows, parameters, policy)
    assert (found[0] - exact[0]).norm() <= 2e-3 * exact[0].norm(), "forward is not rounded by chance"
    for one, other in zip(found[1:], exact[1:], strict=True):  # two draws: some 10 % of noise each
        assert (one - other).norm() <= 0.3 * other.norm()


def test_ranges_are_refused_where_most_of_them_would_be_padding() -> None:
    assert ranges_of(torch.zeros(40 * LONG, 1, dtype=torch.int64), num_experts=64) is None
    assert ranges_of(torch.full((5, 2), -1), num_experts=3) is not None, "nothing to compute is no padding"


def test_rows_keep_their_order_in_an_experts_range() -> None:
    at = ranges_of(torch.tensor([[1, 0], [1, -1], [0, 1]]), num_experts=2)
    assert at is not None
    assert at.spread(10 * at.row_A + at.k_A + 1)[:, :4].tolist() == [[2, 21, 0, 0], [1, 11, 22, 0]]
