"""Linear layers in fp8 on a Hopper GPU: quantising kernels equal their definition, products their operands
multiplied in float64, and the layer costs what its recipe's rounding costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fsdmoe.kernels.backend import has_fp8_products
from fsdmoe.kernels.fp8_linear import KeptCodes
from fsdmoe.kernels.fp8_linears import fp8_linear, fp8_linears
from fsdmoe.kernels.fp8_operands import Operand, Wanted, quantize_both_reference
from fsdmoe.kernels.fp8_quantize import quantize_both, transpose_codes
from fsdmoe.kernels.linear import Linear
from fsdmoe.kernels.quantized_linear import LinearPolicy
from fsdmoe.kernels.scaled_matmul import scaled_matmul
from fsdmoe.precision.formats import E5M2, Recipe
from fsdmoe.precision.operand_state import UNWATCHED
from fsdmoe.precision.quantize import quantize, rounded
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales
from fsdmoe.precision.recipes import build_recipe

pytestmark = pytest.mark.skipif(not has_fp8_products(), reason="needs a Hopper GPU with CUDA 12.9 or later")
NAMES = ("fp8_blockwise", "fp8_rowwise", "fp8_tensorwise")
# Tokens, inputs, outputs: the second has tokens that no product takes, and scales that are padded.
SHAPES = [(4096, 2048, 4096), (1000, 640, 384)]


def recipe_of(name: str, **keys: Any) -> Recipe:
    recipe = build_recipe(name, **keys)  # type: ignore[arg-type]
    assert recipe is not None
    return recipe


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Magnitudes differ by row and by column. Operands of a product need seeds of their own: sums of squares
    grow without a change of sign, which the short accumulator of fast products cuts off by a percent."""
    generator = torch.Generator("cuda").manual_seed(10 * sum(shape) + seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    spread = torch.randn(shape[0], 1, device="cuda", generator=generator).exp()
    return (x * spread * torch.linspace(0.2, 2, shape[1], device="cuda") * scale).bfloat16()


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def operands(recipe: Recipe, shape: tuple[int, int, int]) -> list[tuple[Tensor, Wanted, Wanted]]:
    tokens, inputs, outputs = shape
    assert recipe.forward.second is not None
    assert recipe.dgrad.second is not None
    assert recipe.wgrad.second is not None
    return [
        (random(tokens, inputs), Wanted(recipe.forward.first), Wanted(recipe.wgrad.second)),
        (random(tokens, outputs, scale=1e-5, seed=1), Wanted(recipe.dgrad.first), Wanted(recipe.wgrad.first)),
        (random(outputs, inputs, seed=2), Wanted(recipe.forward.second), Wanted(recipe.dgrad.second)),
    ]


def check(found: Operand | None, expected: Operand | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.kind == expected.kind
    seen = expected.scales > 0  # of rows that only pad: next to nothing
    assert torch.equal(found.scales[seen], expected.scales[seen])
    assert (found.scales[~seen] <= 2.0**-100).all()
    codes, exact = found.codes_RC.float(), expected.codes_RC.float()
    assert (codes != exact).sum() <= 1e-3 * codes.numel()
    torch.testing.assert_close(codes, exact, rtol=0.26, atol=2.0**-8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("powers", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float32)]
)
def test_both_ways_round_are_quantised_as_defined(
    name: str, powers: bool, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    recipe = recipe_of(name, power_of_two_scales=powers)
    for drawn, rows, transposed in operands(recipe, shape):
        x, padded = drawn.to(dtype), -(-len(drawn) // 128) * 128
        found = quantize_both(x, rows, transposed)
        expected = quantize_both_reference(x, rows, transposed, padded)
        check(found.rows, expected.rows)
        check(found.transposed, expected.transposed)


def test_codes_are_transposed_as_they_are() -> None:
    codes = random(640, 384).to(torch.float8_e4m3fn)
    assert torch.equal(transpose_codes(codes).view(torch.uint8), codes.view(torch.uint8).t())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_their_operands_multiplied(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    recipe = recipe_of(name)
    x, dy, weight = (quantize_both(*each) for each in operands(recipe, shape))
    limit = 3e-3 if dtype == torch.bfloat16 else 1e-3
    for first, second in ((x[0], weight[0]), (dy[0], weight[1]), (dy[1], x[1])):
        assert first is not None
        assert second is not None
        exact = first.values().double() @ second.values().double().t()
        out = torch.full_like(exact, torch.nan, dtype=dtype)
        found = scaled_matmul(first, second, dtype)
        scaled_matmul(first, second, dtype, out_MN=out)
        assert error(found, exact) < limit
        assert error(out, exact) < limit


@pytest.mark.parametrize(
    ("name", "gradients"), [*((name, None) for name in NAMES), ("fp8_rowwise", E5M2)], ids=str
)
def test_the_layer_costs_what_exact_quantisation_costs(name: str, gradients: Any) -> None:
    recipe = recipe_of(name, gradients=gradients)
    tokens, inputs, outputs = SHAPES[0]
    x, weight, dy = (
        random(tokens, inputs),
        random(outputs, inputs, scale=inputs**-0.5, seed=2),
        random(tokens, outputs, seed=1),
    )
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = fp8_linear(*leaves, recipe)
    found = (y, *torch.autograd.grad(y, leaves, dy))
    wide = (x.detach().double(), weight.detach().double(), dy.double())
    pairs = ((wide[0], wide[1].t()), (wide[2], wide[1]), (wide[2].t(), wide[0]))
    products = (recipe.forward, recipe.dgrad, recipe.wgrad)
    for one, (first, second), product in zip(found, pairs, products, strict=True):
        assert product.second is not None
        quantised = rounded(first.float(), product.first).double()
        quantised = quantised @ rounded(second.t().float(), product.second).double().t()
        assert error(one, quantised) < 0.01
        assert error(one, first @ second) < 1.1 * error(quantised, first @ second)


class Sink:
    def __init__(self, weight: Tensor) -> None:
        self.buffer, self.num_claims = torch.full_like(weight, torch.nan, dtype=torch.float32), 0

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        self.num_claims += 1
        return self.buffer, self.num_claims > 1


@pytest.mark.parametrize("name", NAMES)
def test_sinks_cached_weights_and_weights_that_came_quantised_change_nothing(name: str) -> None:
    recipe, (tokens, inputs, outputs) = recipe_of(name), SHAPES[1]
    layer = Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.quantized = LinearPolicy(recipe, emulate=False)
    x = random(tokens, inputs).requires_grad_()
    plain = layer(x)
    expected = torch.autograd.grad(plain.sum(), (x, layer.weight))
    sink = layer.weight.grad_sink = Sink(layer.weight)  # type: ignore[attr-defined]
    layer.quantized = LinearPolicy(recipe, emulate=False, kept=KeptCodes(lambda: 0))
    for times in (1, 2):
        y = layer(x)
        (grad_x,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, plain)
        assert torch.equal(grad_x, expected[0])
        assert error(sink.buffer, times * expected[1]) < 5e-3
    if (scaling := recipe.gather_scaling) is None:
        return
    codes, scales = quantize(layer.weight.detach(), scaling)
    block = (scaling.block[0] or outputs, scaling.block[1] or inputs)
    weight = QuantizedWeight(codes.to(torch.float8_e4m3fn), scales=WeightScales(scales, block))
    weight.grad_sink = Sink(layer.weight)  # type: ignore[attr-defined]
    y = fp8_linear(x, weight, recipe)
    y.sum().backward()
    assert error(y, plain) < 1e-3  # codes may differ where a kernel multiplies by the reciprocal
    assert x.grad is not None
    assert error(x.grad, expected[0]) < 1e-3


def test_a_layer_that_the_caller_compiles_computes_the_same() -> None:
    layer = Linear(640, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.quantized = LinearPolicy(recipe_of("fp8_blockwise"), emulate=False)
    x = random(1000, 640).requires_grad_()
    results = []
    for function in (layer, torch.compile(layer)):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.sum(), (x, layer.weight))))
    for one, other in zip(*results, strict=True):
        assert error(one, other) < 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [4096, 1000])
def test_layers_side_by_side_are_as_exact_as_each_alone(name: str, tokens: int) -> None:
    """One product for all of them where blocks allow it, into buffers that lie next to each other."""
    recipe, sizes = recipe_of(name), (1024, 256, 256)
    x, weights = random(tokens, 640), [random(size, 640, seed=2 + n) for n, size in enumerate(sizes)]
    grads = [random(tokens, size, scale=1e-5, seed=7 + n) for n, size in enumerate(sizes)]
    found = []
    for joint in (False, True, None):
        own = [t.double() if joint is None else t.clone() for t in (x, *weights)]
        own_x, *own_weights = (leaf.requires_grad_() for leaf in own)
        if joint is None:
            outputs = [own_x @ weight.t() for weight in own_weights]
        elif joint:
            outputs = list(fp8_linears(own_x, own_weights, recipe, [UNWATCHED] * 3, [None] * 3))
        else:
            outputs = [fp8_linear(own_x, weight, recipe) for weight in own_weights]
        torch.autograd.backward(outputs, [grad.to(y.dtype) for grad, y in zip(grads, outputs, strict=True)])
        found.append([*outputs, *(leaf.grad for leaf in (own_x, *own_weights))])
    for alone, together, exact in zip(*found, strict=True):
        assert error(together, exact) <= 1.01 * error(alone, exact)
        assert error(together, alone) < 0.01
