"""Quantised layers: each product by its own formats, experts apart, gradients to their sinks."""

import pytest
import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.linear import Linear
from fsdmoe.kernels.quantized_linear import LinearPolicy, quantized_linear
from fsdmoe.precision.formats import FP8_BLOCKWISE, Element, Product, Recipe, Scaling
from fsdmoe.precision.recipes import RECIPES, build_recipe

FINE = Scaling(Element("fine", 1e20, 20, -100), (1, None))
NOT_ROUNDED = Recipe("fine", *[Product(FINE, FINE)] * 3)


def test_experts_that_no_kernel_takes_are_refused_unless_they_may_be_emulated() -> None:
    rows = Rows(torch.randn(4, 8), torch.rand(4, 1), torch.zeros(4, 1, dtype=torch.int64))
    weights = ExpertWeights(torch.randn(2, 8, 8), torch.randn(2, 8, 4))
    policy = ExpertPolicy(recipe=FP8_BLOCKWISE)
    assert experts_mlp(rows, weights, policy).shape == (4, 8)
    with pytest.raises(ConfigError, match=r"multiples of 128.*down projections \(2, 8, 4\), swiglu"):
        experts_mlp(rows, weights, policy._replace(emulate=False))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def by_hand(x: Tensor, rows: int, columns: int) -> Tensor:
    """E4M3 in float64, block by block, with torch's own cast."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            here = slice(top, top + rows), slice(left, left + columns)
            scale = x[here].abs().max() / 448
            out[here] = (x[here] / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return out


def test_blockwise_products_are_those_of_blocks_quantised_by_hand() -> None:
    x, weight, dy = draw(300, 256).requires_grad_(), draw(160, 256).requires_grad_(), draw(300, 160)
    recipe = build_recipe("fp8_blockwise")
    assert recipe is not None
    y = quantized_linear(x, weight, recipe)
    y.backward(dy)
    with torch.no_grad():
        w = by_hand(weight, 128, 128)
        assert relative(y.double(), by_hand(x, 1, 128) @ w.t()) < 1e-6
        assert x.grad is not None
        assert relative(x.grad.double(), by_hand(dy, 1, 128) @ w) < 1e-6
        expected = by_hand(dy.t(), 1, 128) @ by_hand(x.t(), 128, 300).t()
        assert weight.grad is not None
        assert relative(weight.grad.double(), expected) < 1e-6


@pytest.mark.parametrize("name", RECIPES[1:])
def test_every_recipe_costs_what_its_formats_cost(name: str) -> None:
    """Of normal numbers: 3 mantissa bits about 2.6 % an operand, 2 bits 5 %, E2M1 in sixteens 10 %."""
    torch.manual_seed(0)
    x, weight, dy = draw(256, 256).requires_grad_(), draw(128, 256).requires_grad_(), draw(256, 128)
    recipe = build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None
    y = quantized_linear(x, weight, recipe)
    found = (y, *torch.autograd.grad(y, (x, weight), dy))
    exact_y = x @ weight.t()
    exact = (exact_y, *torch.autograd.grad(exact_y, (x, weight), dy))
    low, high = (0.10, 0.20) if name == "nvfp4" else (0.025, 0.07)
    for one, other in zip(found, exact, strict=True):
        assert low < relative(one, other) < high


def test_without_rounding_experts_are_the_reference_with_biases_and_either_order_of_weights() -> None:
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1], [0, 3], [2, 0]])
    for weight_after in (False, True):
        leaves = [draw(5, 16), draw(5, 2).abs(), draw(4, 16, 16), draw(4, 16, 8), draw(4, 16, seed=1),
                  draw(4, 16, seed=2)]  # fmt: skip
        results = []
        for recipe in (None, NOT_ROUNDED):
            x, weights, *parameters = (leaf.clone().requires_grad_() for leaf in leaves)
            policy = ExpertPolicy("swiglu", weight_after, recipe)
            function = experts_mlp_reference if recipe is None else experts_mlp
            y = function(Rows(x, weights, ids), ExpertWeights(*parameters), policy)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, weights, *parameters))))
        for one, other in zip(*results, strict=True):
            assert relative(one, other) < 1e-5


def test_blocks_along_tokens_do_not_span_experts() -> None:
    """A huge token of one expert must not coarsen the weight gradient of another."""
    recipe = build_recipe("fp8_blockwise")
    weights = [draw(2, 64, 64), draw(2, 64, 32)]
    x, ids = draw(8, 64), torch.tensor([[0]] * 4 + [[1]] * 4)
    gradients = []
    for factor in (1.0, 1e4):
        scaled = torch.cat((x[:4], factor * x[4:]))
        parameters = [weight.clone().requires_grad_() for weight in weights]
        y = experts_mlp(
            Rows(scaled, torch.ones(8, 1), ids), ExpertWeights(*parameters), ExpertPolicy(recipe=recipe)
        )
        y[:4].sum().backward()
        gradients.append([parameter.grad[0] for parameter in parameters])  # type: ignore[index]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


class Sink:
    def __init__(self, shape: torch.Size) -> None:
        self.buffer, self.num_claims = torch.full(shape, 7.0), 0

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        self.num_claims += 1
        return self.buffer, self.num_claims > 1


def test_a_layers_gradient_goes_to_its_sink_and_is_added_up_there() -> None:
    recipe, x = build_recipe("fp8_rowwise"), draw(6, 32)
    layer, plain = Linear(32, 24, bias=True), Linear(32, 24, bias=True)
    plain.load_state_dict(layer.state_dict())
    assert recipe is not None
    layer.quantized = plain.quantized = LinearPolicy(recipe)
    sink = Sink(layer.weight.shape)
    layer.weight.grad_sink = sink  # type: ignore[attr-defined]
    for _ in range(2):
        layer(x.view(2, 3, 32)).square().sum().backward()
        plain(x.view(2, 3, 32)).square().sum().backward()
    assert layer.weight.grad is None
    assert plain.weight.grad is not None
    assert torch.equal(sink.buffer, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("num_experts", [2, 8], ids=["all at once", "one by one"])
@pytest.mark.parametrize("recipe", [NOT_ROUNDED, FP8_BLOCKWISE], ids=["exact", "fp8"])
def test_updates_next_to_quantised_products_are_within_the_recipes_error(
    recipe: Recipe, num_experts: int
) -> None:
    ids = torch.zeros(48, 1, dtype=torch.int64)
    ids[:9] = num_experts - 1
    frozen = ExpertWeights(draw(num_experts, 128, 128) / 11, draw(num_experts, 128, 64) / 8)
    shapes = ((4, 128), (128, 4), (4, 64), (128, 4))
    drawn = [draw(48, 128), draw(48, 1).abs(), *(draw(num_experts, *shape) / 8 for shape in shapes)]

    def run(dtype: torch.dtype, policy: ExpertPolicy | None) -> list[Tensor]:
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in drawn]
        rows = Rows(leaves[0], leaves[1], ids)
        base = ExpertWeights(frozen.gate_up_E2ND.to(dtype), frozen.down_EDN.to(dtype))
        updates = LowRankUpdates(*leaves[2:])
        if policy is None:
            y = experts_mlp_reference(rows, base, updates=updates)
        else:
            y = experts_mlp(rows, base, policy, updates=updates)
        return [y.detach(), *torch.autograd.grad(y, leaves, draw(48, 128, seed=1).to(dtype))]

    exact, found = run(torch.float64, None), run(torch.float32, ExpertPolicy(recipe=recipe))
    errors = [relative(ours.double(), right) for ours, right in zip(found, exact, strict=True)]
    limit = 1e-4 if recipe is NOT_ROUNDED else 0.08
    assert max(errors) < limit, errors
    assert recipe is NOT_ROUNDED or min(errors) > 1e-3, "what is updated is quantised"
