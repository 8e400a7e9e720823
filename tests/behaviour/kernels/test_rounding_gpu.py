"""Emulated experts and linear layers on a GPU: by kernels what plain torch computes, without a wait."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.backend import has_fp8_kernels, kernels
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.quantized_linear import quantized_matmul
from fsdmoe.precision.recipes import build_recipe
from tests.behaviour.kernels.test_fp8_gpu import SHAPES, Layer, error, errors

pytestmark = pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
NAMES = ("fp8_rowwise", "fp8_tensorwise", "mxfp8", "nvfp4")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_experts_equal_those_of_plain_torch(name: str, shape: tuple[int, ...]) -> None:
    layer, recipe = Layer(*shape), build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None

    def compute(rows: Rows, weights: ExpertWeights) -> torch.Tensor:
        return experts_mlp_quantized(rows, weights, ExpertPolicy(recipe=recipe), recipe)

    layer.run(compute)  # what is made once is copied to the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = layer.run(compute)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with kernels("torch"):
        found = errors(ours, layer.run(compute))
    assert not ours[2][layer.ids < 0].any()
    # Sums in another order turn over bits of bf16, and codes next to the middle between two; four bits have
    # few, and gradients are rounded by chance.
    limits = dict.fromkeys(found, 0.4) | {"y": 0.03} if name == "nvfp4" else dict.fromkeys(found, 1e-2)
    assert all(value < limits[of] for of, value in found.items())


@pytest.mark.parametrize("name", NAMES)
def test_products_equal_those_of_plain_torch(name: str) -> None:
    recipe = build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, dy = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for shape in ((1000, 384), (256, 384), (1000, 256))
    )
    for role, operands in {"forward": (x, weight), "dgrad": (dy, weight.mT), "wgrad": (dy.mT, x.mT)}.items():
        product = getattr(recipe, role)
        found = quantized_matmul(*operands, product)
        with kernels("torch"):
            expected = quantized_matmul(*operands, product)
        assert error(found, expected) < (0.4 if product.first.stochastic else 1e-5), role
