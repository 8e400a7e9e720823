"""Emulated products by kernels: what plain torch rounds to and multiplies, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.quantized_linear import quantized_matmul
from fsdmoe.kernels.triton.round_kernels import Segments, mapped, round_operand, supports_scaling
from fsdmoe.kernels.triton.row_map import build_row_map
from fsdmoe.precision.formats import E2M1, E4M3, E5M2, Product, Scaling
from fsdmoe.precision.quantize import rounded
from fsdmoe.precision.recipes import build_recipe

pytestmark = pytest.mark.usefixtures("poisoned", "bf16_as_on_a_gpu")
SCALINGS = {
    "row": Scaling(E4M3, (1, None)),
    "whole": Scaling(E5M2, (None, None)),
    "whole, power of two": Scaling(E4M3, (None, None), "power_of_two"),
    "mx": Scaling(E4M3, (1, 32), "power_of_two"),
    "nv": Scaling(E2M1, (1, 16), "two_level"),
    "nv weight": Scaling(E2M1, (16, 16), "two_level"),
}


def draw(*shape: int) -> torch.Tensor:
    """Of many magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(sum(shape))
    spread = torch.randn(shape, generator=generator).mul(2).exp()
    values = torch.randn(shape, generator=generator) * spread
    values[..., 3:5, :] = 0
    return values.bfloat16()


def check(found: torch.Tensor, expected: torch.Tensor, scaling: Scaling) -> None:
    # The upper level of two is multiplied last: by a factor of the product.
    torch.testing.assert_close(found, expected, rtol=3e-7 if scaling.scale == "two_level" else 0, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_operands_are_rounded_as_plain_torch_does(name: str, transposed: bool) -> None:
    scaling, x = SCALINGS[name], draw(2, 64, 160)
    assert supports_scaling(scaling)
    values, factors = round_operand(x.view(-1, 160), scaling, Segments(2, 128), transposed=transposed)
    found = values.view(x.shape).float()
    if factors is not None:
        found = found * (factors.view(2, 1, 160) if transposed else factors.view(2, 64, 1))
    expected = rounded(x.mT, scaling).mT if transposed else rounded(x, scaling)
    check(found, expected, scaling)


def test_scales_that_bf16_cannot_hold_are_left_to_plain_torch() -> None:
    assert not supports_scaling(Scaling(E4M3, (1, 128)))
    assert not supports_scaling(Scaling(E4M3, (32, None), "power_of_two"))


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "mxfp8", "nvfp4"])
def test_products_are_those_of_plain_torch(name: str) -> None:
    recipe = build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None
    x, weight, dy = draw(80, 96), draw(64, 96), draw(80, 64)
    operands = {"forward": (x, weight), "dgrad": (dy, weight.mT), "wgrad": (dy.mT, x.mT)}
    for role, (first, second) in operands.items():
        product = getattr(recipe, role)
        with kernels("triton"):
            found = quantized_matmul(first, second, product)
        if product.first.stochastic:
            found, limit = found.float(), 0.5
        else:
            limit = 1e-6
        with kernels("torch"):
            expected = quantized_matmul(first, second, product)
        assert (found - expected).norm() <= limit * expected.norm(), role


@pytest.mark.parametrize("num_tokens", [1, 8, 72, 80])
def test_a_rotation_takes_whole_groups_of_any_number_of_tokens(num_tokens: int) -> None:
    recipe = build_recipe("nvfp4")
    assert recipe is not None
    assert recipe.wgrad.second is not None
    operands = (replace(each, stochastic=False) for each in (recipe.wgrad.first, recipe.wgrad.second))
    product = Product(*operands)
    x, dy = draw(num_tokens, 96), draw(num_tokens, 64)
    with kernels("triton"):
        found = quantized_matmul(dy.mT, x.mT, product)
    with kernels("torch"):
        expected = quantized_matmul(dy.mT, x.mT, product)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_segments_of_a_map_are_operands_of_their_own() -> None:
    ids = torch.tensor([[0], [2], [2], [0], [2]])
    row_map = build_row_map(ids, 3, align=64)
    x = torch.zeros(row_map.capacity, 64, dtype=torch.bfloat16)
    x[row_map.position_RK.flatten().long()] = draw(5, 64)
    for scaling in SCALINGS.values():
        values, factors = round_operand(x, scaling, mapped(row_map), transposed=True)
        for segment in range(3):
            rows = slice(*row_map.offsets[segment : segment + 2].tolist())
            found = values[rows].float() * (1 if factors is None else factors[segment])
            check(found, rounded(x[rows].mT, scaling).mT, scaling)


def test_experts_are_those_of_plain_torch() -> None:
    check_experts("mxfp8")


def check_experts(name: str) -> None:
    torch.manual_seed(0)
    num_experts, hidden, width = 3, 64, 64
    ids = torch.rand(40, num_experts).argsort(1)[:, :2]
    ids[::7, 1] = -1
    ids[ids == 1] = -1  # one expert has no rows
    x, weights = torch.randn(40, hidden).bfloat16(), torch.rand(40, 2)
    parameters = [(torch.randn(num_experts, 2 * width, hidden) / 8).bfloat16(),
                  (torch.randn(num_experts, hidden, width) / 8).bfloat16()]  # fmt: skip
    recipe = build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None
    dy = torch.randn(40, hidden).bfloat16()
    results = []
    for choice in ("triton", "torch"):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, weights, *parameters)]
        with kernels(choice):  # type: ignore[arg-type]
            rows = Rows(leaves[0], leaves[1], ids)
            y = experts_mlp_quantized(rows, ExpertWeights(*leaves[2:]), ExpertPolicy(recipe=recipe), recipe)
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for index, (found, expected) in enumerate(zip(*results, strict=True)):
        limit = 0.4 if name == "nvfp4" and index else 1e-4  # stochastic rounding of gradients
        assert (found.float() - expected.float()).norm() <= limit * expected.float().norm(), index
