"""Linear layers on products in fp8: what the emulation computes, quantised as seldom as possible."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdmoe.core.capturing import compute_again
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels import fp8_linear as layers
from fsdmoe.kernels import quantized_linear as emulation
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.fp8_linear import KeptCodes, supports_linear
from fsdmoe.kernels.fp8_linears import fp8_linear, fp8_linears
from fsdmoe.kernels.fp8_operands import Operand, Wanted, takes_products
from fsdmoe.kernels.fp8_quantize import quantize_both
from fsdmoe.kernels.quantized_linear import LinearPolicy, linear_by_recipe, quantized_linear
from fsdmoe.kernels.scaled_matmul import block_scales_as_read, scaled_matmul
from fsdmoe.precision.formats import E4M3, E5M2, Recipe, Scaling
from fsdmoe.precision.operand_state import UNWATCHED
from fsdmoe.precision.quantize import quantize
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales
from fsdmoe.precision.recipes import RECIPES, build_recipe

NAMES = ("fp8_blockwise", "fp8_rowwise", "fp8_tensorwise")


def recipe_of(name: str, **keys: Any) -> Recipe:
    recipe = build_recipe(name, **keys)  # type: ignore[arg-type]
    assert recipe is not None
    return recipe


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("powers", [False, True])
def test_products_are_those_of_the_emulation(name: str, powers: bool) -> None:
    """A number of tokens that no product takes, too."""
    recipe = recipe_of(name, power_of_two_scales=powers)
    size = 128 if name == "fp8_blockwise" else 16
    x, weight, dy = draw(2, 75, 2 * size), draw(size, 2 * size), draw(2, 75, size)
    results = []
    for function in (fp8_linear, quantized_linear):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(*leaves, recipe)
        assert y.shape == (2, 75, size)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for one, other in zip(*results, strict=True):
        assert relative(one, other) < 1e-6


class Sink:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.buffer, self.num_claims = torch.full(shape, 7.0), 0

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        self.num_claims += 1
        return self.buffer, self.num_claims > 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trains", ["all", "input", "weights"])
def test_layers_side_by_side_compute_what_each_does_alone(name: str, trains: str) -> None:
    """Products of blocks are joined, and so is the sum of their input's gradients."""
    recipe = recipe_of(name)
    x, weights = draw(2, 75, 256), [draw(size, 256, seed=size) for size in (256, 128, 128)]
    grads = [draw(2, 75, len(weight), seed=7) for weight in weights]

    def leaves() -> tuple[Tensor, list[Tensor]]:
        own = [weight.clone().requires_grad_(trains != "input") for weight in weights]
        return x.clone().requires_grad_(trains != "weights"), own

    (one_x, one), (each_x, each) = leaves(), leaves()
    together = fp8_linears(one_x, one, recipe, [UNWATCHED] * 3, [None] * 3)
    alone = [fp8_linear(each_x, weight, recipe) for weight in each]
    for ours, expected in zip(together, alone, strict=True):
        assert torch.equal(ours, expected)
    torch.autograd.backward(together, grads)
    torch.autograd.backward(alone, grads)
    for ours, expected in zip((one_x, *one), (each_x, *each), strict=True):
        assert (ours.grad is None) == (expected.grad is None)
        if ours.grad is not None and expected.grad is not None:
            assert relative(ours.grad, expected.grad) < 1e-6


@pytest.mark.parametrize("are_neighbours", [True, False])
def test_gradients_side_by_side_go_to_their_sinks(are_neighbours: bool) -> None:
    recipe = recipe_of("fp8_blockwise")
    x, sizes = draw(75, 256), (256, 128, 128)
    weights = [draw(size, 256, seed=size).requires_grad_() for size in sizes]
    expected = [draw(size, 256, seed=size).requires_grad_() for size in sizes]
    flat = torch.full((sum(sizes) + 3, 256), 7.0)
    sinks = [Sink((size, 256)) for size in sizes]
    for number, (sink, weight) in enumerate(zip(sinks, weights, strict=True)):
        first = sum(sizes[:number]) + number * (not are_neighbours)
        sink.buffer = flat[first : first + len(weight)]
        weight.grad_sink = sink  # type: ignore[attr-defined]
    for times in (1, 2):
        for outputs in (
            fp8_linears(x, weights, recipe, [UNWATCHED] * 3, [None] * 3),
            [fp8_linear(x, weight, recipe) for weight in expected],
        ):
            torch.autograd.backward(outputs, [draw(75, size, seed=7) for size in sizes])
        assert [sink.num_claims for sink in sinks] == [times] * 3
        for sink, weight in zip(sinks, expected, strict=True):
            assert weight.grad is not None
            assert relative(sink.buffer, weight.grad) < 1e-6
    assert (flat[-1] == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_overwrites_its_sink_once_and_is_added_after(name: str) -> None:
    size = 128 if name == "fp8_blockwise" else 16
    recipe, x, weight = recipe_of(name), draw(64, size), draw(size, size).requires_grad_()
    (expected,) = torch.autograd.grad(fp8_linear(x, weight, recipe).square().sum(), weight)
    sink = Sink(weight.shape)
    weight.grad_sink = sink  # type: ignore[attr-defined]
    for times in (1, 2):
        fp8_linear(x, weight, recipe).square().sum().backward()
        assert weight.grad is None
        assert relative(sink.buffer, times * expected) < 1e-6


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    calls: list[torch.Size] = []

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(x.shape)
        return quantize_both(x, *args, **kwargs)

    monkeypatch.setattr(layers, "quantize_both", counting)
    return calls


def test_layers_that_read_one_tensor_quantise_it_once_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, recipe = count_calls(monkeypatch), recipe_of("fp8_blockwise")
    x, weights = draw(200, 256).requires_grad_(), [draw(128, 256, seed=i).requires_grad_() for i in range(3)]
    inner = x * 1
    sum(fp8_linear(inner, weight, recipe).sum() for weight in weights).backward()  # type: ignore[union-attr]
    assert calls.count(inner.shape) == 2
    first = fp8_linear(inner, weights[0], recipe)
    inner.detach().mul_(2)
    assert relative(fp8_linear(inner, weights[0], recipe), 2 * first) < 1e-6, "written to in between"


def test_a_weight_is_quantised_again_only_when_its_owner_says_it_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, recipe, version = count_calls(monkeypatch), recipe_of("fp8_rowwise"), 0
    weight = draw(48, 64).requires_grad_()
    fp8_linear(draw(16, 64).requires_grad_(), weight, recipe).sum().backward()
    assert calls.count(weight.shape) == 2, "nobody promised anything: once for each product"
    kept = KeptCodes(lambda: version)
    for expected in (3, 3, 4):
        if expected == 4:
            version = 1
            weight.data.mul_(2)
        x = draw(16, 64).requires_grad_()
        y = fp8_linear(x, weight, recipe, kept=kept)
        y.sum().backward()
        assert calls.count(weight.shape) == expected
    assert relative(y, quantized_linear(x, weight, recipe)) < 1e-6


def test_a_layer_that_is_recomputed_quantises_its_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kept = count_calls(monkeypatch), KeptCodes(lambda: 0)
    weight = draw(48, 64).requires_grad_()
    for _ in range(2):
        layer = functools.partial(fp8_linear, weight_NK=weight, recipe=recipe_of("fp8_rowwise"), kept=kept)
        compute_again(layer, draw(16, 64).requires_grad_()).sum().backward()
    assert calls.count(weight.shape) == 1


def test_a_graph_quantises_weights_itself_whoever_keeps_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kept = count_calls(monkeypatch), KeptCodes(lambda: 0)
    weight = draw(48, 64).requires_grad_()
    for is_captured, expected in ((False, 1), (True, 3), (True, 5), (False, 6)):
        monkeypatch.setattr("fsdmoe.kernels.fp8_linear.is_capturing", lambda now=is_captured: now)
        x = draw(16, 64).requires_grad_()
        fp8_linear(x, weight, recipe_of("fp8_rowwise"), kept=kept).sum().backward()
        assert calls.count(weight.shape) == expected


@pytest.mark.parametrize("name", ["fp8_blockwise", "fp8_tensorwise"])
def test_weights_that_come_quantised_are_taken_as_they_are(name: str) -> None:
    size = 128 if name == "fp8_blockwise" else 16
    recipe, x, weight = recipe_of(name), draw(40, 2 * size).requires_grad_(), draw(size, 2 * size)
    scaling = recipe.gather_scaling
    assert scaling is not None
    codes_RC, scales = quantize(weight, scaling)
    block = (scaling.block[0] or size, scaling.block[1] or 2 * size)
    codes = QuantizedWeight(codes_RC.to(torch.float8_e4m3fn), scales=WeightScales(scales, block))
    with pytest.raises(RuntimeError, match="no place to go"):
        fp8_linear(x, codes, recipe)
    codes.grad_sink = Sink(weight.shape)  # type: ignore[attr-defined]
    y = fp8_linear(x, codes, recipe)
    plain = weight.clone().requires_grad_()
    exact = fp8_linear(x, plain, recipe)
    assert torch.equal(y, exact)
    y.sum().backward()
    (grad_x, grad_weight) = torch.autograd.grad(exact.sum(), (x, plain))
    assert x.grad is not None
    assert relative(x.grad, grad_x) < 1e-6
    assert relative(codes.grad_sink.buffer, grad_weight) < 1e-6  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_whose_weight_is_frozen_keeps_nothing_of_its_input(name: str) -> None:
    recipe, weight = recipe_of(name), draw(128, 256)
    x = draw(16, 256).requires_grad_()
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = fp8_linear(x, weight, recipe)
    assert kept == [weight.shape]
    exact = quantized_linear(x, weight, recipe)
    found, expected = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, exact))
    assert relative(found, expected) < 1e-6


@pytest.mark.parametrize("before", NAMES)
def test_a_layer_whose_recipe_is_exchanged_computes_by_the_new_one(before: str) -> None:
    weight = draw(128, 256).requires_grad_()
    kept = KeptCodes(lambda: 1)
    fp8_linear(draw(16, 256), weight, recipe_of(before), kept=kept)
    for name in NAMES:
        x, recipe = draw(16, 256).requires_grad_(), recipe_of(name)
        y, exact = fp8_linear(x, weight, recipe, kept=kept), quantized_linear(x, weight, recipe)
        assert relative(y, exact) < 1e-6
        found, expected = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, exact))
        assert relative(found, expected) < 1e-6


def test_codes_of_one_recipe_are_refused_by_another() -> None:
    scaling = recipe_of("fp8_blockwise").gather_scaling
    assert scaling is not None
    codes_RC, scales = quantize(draw(256, 256), scaling)
    in_fp8 = codes_RC.to(torch.float8_e4m3fn)
    codes = QuantizedWeight(in_fp8, False, scales=WeightScales(scales, (128, 128)))
    assert linear_by_recipe(draw(16, 256), codes, LinearPolicy(recipe_of("fp8_blockwise"))).shape == (16, 256)
    with pytest.raises(ConfigError, match=r"blocks of 256 x 256, got blocks of 128 x 128: .* build it again"):
        linear_by_recipe(draw(16, 256), codes, LinearPolicy(recipe_of("fp8_tensorwise")))
    rows = Rows(draw(4, 256), torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64))
    experts = QuantizedWeight(in_fp8[None], False, scales=WeightScales(scales[None], (128, 128)))
    policy = ExpertPolicy(recipe=recipe_of("fp8_tensorwise"))
    with pytest.raises(ConfigError, match="got blocks of 128 x 128"):
        experts_mlp(rows, ExpertWeights(draw(1, 512, 256), experts), policy)


def test_recipes_without_products_and_odd_widths_are_told_apart() -> None:
    recipes = map(recipe_of, RECIPES[1:])
    assert {recipe.name for recipe in recipes if takes_products(recipe)} == set(NAMES)
    assert not takes_products(recipe_of("fp8_blockwise", gradients=E5M2))
    assert takes_products(recipe_of("fp8_rowwise", gradients=E5M2))
    x = draw(16, 128)
    assert supports_linear(recipe_of("fp8_rowwise"), x, draw(48, 128))
    assert not supports_linear(recipe_of("fp8_rowwise"), x, draw(40, 128))
    assert supports_linear(recipe_of("fp8_blockwise"), x, draw(48, 128)), "outputs are padded"
    assert not supports_linear(recipe_of("fp8_blockwise"), x, draw(128, 48))
    assert not supports_linear(recipe_of("fp8_rowwise"), x[:0], draw(48, 128))
    policy = LinearPolicy(recipe_of("fp8_rowwise"), emulate=False)
    with pytest.raises(
        ConfigError, match=r"multiples of 16\), got torch.float32 on cpu, a weight \(48, 128\)"
    ):
        linear_by_recipe(x, draw(48, 128), policy)
    assert linear_by_recipe(x[:0], draw(48, 128), policy).shape == (0, 48), "no rows need no kernel"


def test_scales_of_blocks_lie_as_the_product_reads_them() -> None:
    codes = torch.zeros(256, 640)
    rows = quantize_both(codes, Wanted(Scaling(E4M3, (1, 128))), None).rows
    square = quantize_both(codes, Wanted(Scaling(E4M3, (128, 128))), None).rows
    assert rows is not None
    assert square is not None
    assert (block_scales_as_read(rows).shape, block_scales_as_read(rows).stride()) == ((256, 5), (1, 256))
    assert (block_scales_as_read(square).shape, block_scales_as_read(square).stride()) == ((8, 2), (1, 8))


def test_one_scale_a_row_goes_with_one_scale_for_all() -> None:
    first, second = draw(32, 64), draw(48, 64)
    one = quantize_both(first, Wanted(Scaling(E4M3, (1, None))), None, pad=False).rows
    other = quantize_both(second, Wanted(Scaling(E4M3, (None, None))), None, pad=False).rows
    assert isinstance(one, Operand)
    assert isinstance(other, Operand)
    for pair in ((one, other), (other, one)):
        found = scaled_matmul(*pair, torch.float32)
        assert relative(found, pair[0].values() @ pair[1].values().t()) < 1e-6


def test_a_layer_that_the_caller_compiles_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "takes_fp8_products", lambda x: True)
    policy = LinearPolicy(recipe_of("fp8_tensorwise"), emulate=False)
    weight, dy = draw(48, 64), draw(2, 20, 48)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return linear_by_recipe(x.relu(), weight, policy) * 2

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        leaves = draw(2, 20, 64).requires_grad_(), weight.clone().requires_grad_()
        y = function(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for one, other in zip(*results, strict=True):
        assert relative(one, other) < 1e-6


def noted(kept: list[Tensor], tensor: Tensor) -> Tensor:
    kept.append(tensor)
    return tensor


@pytest.mark.parametrize("powers", [False, True])
def test_kept_codes_serve_backward_nearly_as_well_as_the_input(powers: bool) -> None:
    """At most 1.3 times the error of weight gradients against fp64; the same gradient of the input."""
    recipe = recipe_of("fp8_blockwise", power_of_two_scales=powers)
    x = draw(300, 256) * draw(300, 1).exp() * torch.linspace(0.2, 2, 256)
    weights, dy = [draw(128, 256, seed=seed) / 16 for seed in (1, 2)], draw(300, 128)
    exact = dy.double().t() @ x.double()
    results = []
    for keeps_codes in (False, True):
        leaves = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights)]
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(noted, kept), lambda t: t):
            outputs = fp8_linears(
                leaves[0], leaves[1:], recipe, [UNWATCHED] * 2, [None] * 2, keeps_codes=keeps_codes
            )
        assert any(t.data_ptr() == leaves[0].data_ptr() for t in kept) != keeps_codes
        assert any(t.dtype == torch.float8_e4m3fn and len(t) == 384 for t in kept) == keeps_codes
        results.append((outputs, torch.autograd.grad(outputs, leaves, [dy, dy])))
    (values_y, values), (codes_y, codes) = results
    assert torch.equal(values_y[0], codes_y[0])
    assert torch.equal(values[0], codes[0])
    for one, other in zip(values[1:], codes[1:], strict=True):
        assert (
            relative(one.double(), exact)
            < relative(other.double(), exact)
            < 1.3 * relative(one.double(), exact)
        )


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("coded", [False, True])
def test_outputs_that_are_no_whole_blocks_are_padded(has_sink: bool, coded: bool) -> None:
    """As DeepSeek-V3's 576: the emulation's products, whose last block is smaller."""
    recipe = recipe_of("fp8_blockwise")
    x, weight, dy = draw(2, 75, 256), draw(192, 256), draw(2, 75, 192)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad(y := quantized_linear(*leaves, recipe), leaves, dy)
    x = x.requires_grad_()
    sink = Sink(weight.shape)
    own: Tensor = weight.requires_grad_()
    if coded:
        quantized = quantize(weight.detach(), recipe.forward.second or recipe.forward.first)
        codes = quantized.codes_RC.to(torch.float8_e4m3fn)
        own = QuantizedWeight(codes, scales=WeightScales(quantized.scales_BB, (128, 128)))
    if has_sink or coded:
        own.grad_sink = sink  # type: ignore[attr-defined]
    for times in (1, 2):
        found = fp8_linear(x, own, recipe)
        assert found.shape == (2, 75, 192)
        assert relative(found, y) < 1e-6
        grads = torch.autograd.grad(found, (x, own), dy, allow_unused=True)
        assert relative(grads[0], expected[0]) < 1e-6
        gradient = sink.buffer / times if has_sink or coded else grads[1]
        assert relative(gradient, expected[1]) < 1e-6
