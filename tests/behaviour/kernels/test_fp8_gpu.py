"""Experts in fp8 on a Hopper GPU: each kernel equals its reference, the layer equals the emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.backend import has_fp8_kernels, kernels
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.gluon import experts_mlp_fp8, fp8_launch, fp8_swiglu_grad
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import Codes, expert_scales, quantize_rows, sort_weights
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.precision.formats import FP8_BLOCKWISE, Recipe
from fsdmoe.precision.quantize import quantize
from tests.support import fp8_reference
from tests.support.fp8_reference import restore_tokens

pytestmark = pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
POWERS = FP8_BLOCKWISE.with_power_of_two_scales()
# Rows, hidden size, expert width, experts, choices a row.
SHAPES = [
    (300, 256, 128, 4, 1),
    (2000, 384, 640, 5, 2),  # last tiles of 128 columns everywhere
    (1500, 256, 384, 40, 8),  # about 300 rows an expert
    (4096, 2048, 768, 16, 8),
]
NAMES = ("y", "dx", "dweights", "dgate_up", "ddown")


class Layer:
    """Random operands on the GPU. Loads fall off by expert, the last expert gets no rows, some ids are -1."""

    def __init__(self, num_rows: int, d: int, n: int, num_experts: int, top_k: int) -> None:
        generator = torch.Generator("cuda").manual_seed(num_rows)

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(size, device="cuda", generator=generator) * scale).bfloat16()

        self.d, self.n, self.num_experts = d, n, num_experts
        scores = torch.rand(num_rows, num_experts, device="cuda", generator=generator)
        scores *= torch.linspace(1, 0.5, num_experts, device="cuda")
        scores[:, -1] = -1
        self.ids = scores.topk(top_k, dim=-1).indices
        self.ids[::7, -1] = -1
        self.weights = torch.rand(num_rows, top_k, device="cuda", generator=generator)
        spread = torch.randn(num_rows, 1, device="cuda", generator=generator).exp().bfloat16()
        self.x, self.dy = random(num_rows, d) * spread, random(num_rows, d, scale=1e-6)
        self.gate_up = random(num_experts, 2 * n, d, scale=d**-0.5)
        self.down = random(num_experts, d, n, scale=n**-0.5)
        self.map: RowMap = build_row_map(self.ids, num_experts, align=128)
        self.used = int(self.map.offsets[num_experts])

    def run(self, function: Any) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (self.x, self.weights, self.gate_up, self.down)]
        x, weights, gate_up, down = leaves
        y = function(Rows(x, weights, self.ids), ExpertWeights(gate_up, down))
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]


def fused(recipe: Recipe = FP8_BLOCKWISE, max_rows: int | None = None, **options: Any) -> Any:
    def compute(rows: Rows, weights: ExpertWeights) -> torch.Tensor:
        return experts_mlp_fp8(rows, weights, ExpertPolicy(recipe=recipe, **options), max_rows)

    return compute


def emulated(recipe: Recipe = FP8_BLOCKWISE) -> Any:
    def compute(rows: Rows, weights: ExpertWeights) -> torch.Tensor:
        return experts_mlp_quantized(rows, weights, ExpertPolicy(recipe=recipe), recipe)

    return compute


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def errors(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    found = {name: error(a, b) for name, a, b in zip(NAMES, ours, exact, strict=True)}
    print(" ".join(f"{name} {value:.2e}" for name, value in found.items()))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [FP8_BLOCKWISE, POWERS], ids=["float32", "power_of_two"])
def test_the_layer_equals_the_emulation(shape: tuple[int, ...], recipe: Recipe) -> None:
    layer = Layer(*shape)
    ours, exact = layer.run(fused(recipe)), layer.run(emulated(recipe))
    assert all(value < 1e-2 for value in errors(ours, exact).values())
    assert not ours[2][layer.ids < 0].any()
    # What is computed is fp8: bf16 is several times as far from it as the emulation is.
    assert min(errors(layer.run(experts_mlp_reference), ours).values()) > 2e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [FP8_BLOCKWISE, POWERS], ids=["float32", "power_of_two"])
def test_kept_codes_change_gradients_by_little(shape: tuple[int, ...], recipe: Recipe) -> None:
    """Against bf16, which is far closer to what is exact than either: at most 1.3 times the error."""
    layer = Layer(*shape)
    exact = layer.run(experts_mlp_reference)
    values = errors(layer.run(fused(recipe)), exact)
    found = layer.run(fused(recipe, keeps_codes=True, has_own_rows=True))
    codes = errors(found, exact)
    assert codes["y"] == values["y"]
    assert all(codes[name] <= 1.3 * values[name] for name in NAMES)
    assert not found[2][layer.ids < 0].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pre_activation_is_kept_as_its_codes(shape: tuple[int, ...]) -> None:
    layer = Layer(*shape)
    weight, _ = quantize_weight(layer.gate_up, power_of_two=False)
    x = quantize_rows(layer.x, layer.map, power_of_two=False)
    given = (x, layer.weights, weight, layer.map)
    options: dict[str, Any] = {"power_of_two": False, "dtype": torch.bfloat16}
    pre, act = fp8_launch.gate_up(*given, keep="values", **options)
    codes, same_act = fp8_launch.gate_up(*given, keep="codes", **options)
    assert isinstance(codes, Codes)
    assert torch.equal(same_act.codes[: layer.used].float(), act.codes[: layer.used].float())
    assert isinstance(pre, torch.Tensor)
    expected = fp8_reference.quantized_rows(pre.flatten(0, 1).float(), power_of_two=False)
    decoded, wanted = (
        fp8_reference.rows_of(each).view(pre.shape)[:, : layer.used] for each in (codes, expected)
    )
    assert torch.equal(decoded, wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_matrix_products_equal_their_references(shape: tuple[int, ...]) -> None:
    layer = Layer(*shape)
    options: dict[str, Any] = {"power_of_two": False}
    gate_up, _ = quantize_weight(layer.gate_up, **options)
    down, down_transposed = quantize_weight(layer.down, **options)
    x = quantize_rows(layer.x, layer.map, **options)
    used, bf16 = slice(layer.used), {"dtype": torch.bfloat16}
    given = (x, layer.weights, gate_up, layer.map)
    (pre, act), (expected_pre, expected_act) = (
        package.gate_up(*given, keep="values", **options, **bf16) for package in (fp8_launch, fp8_reference)
    )
    assert error(pre[:, used], expected_pre[:, used]) < 2e-3
    assert error(act.scales[:, used], expected_act.scales[:, used]) < 2e-3
    # Values, not codes: the sigmoid is off by 2^-12, which turns over codes next to the middle between two,
    # and is many steps of the smallest ones.
    assert error(fp8_reference.rows_of(act)[used], fp8_reference.rows_of(expected_act)[used]) < 1e-2
    nothing_kept = fp8_launch.gate_up(*given, keep="nothing", **options, **bf16)
    assert nothing_kept[0] is None
    assert torch.equal(nothing_kept[1].codes[used].float(), act.codes[used].float())
    for weight, rows in ((down, act), (down_transposed, x)):
        y, expected = (p.project(rows, weight, layer.map, **bf16) for p in (fp8_launch, fp8_reference))
        assert error(y[used], expected[used]) < 2e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_weight_gradient_equals_its_reference(
    shape: tuple[int, ...], dtype: torch.dtype, accumulate: bool
) -> None:
    layer = Layer(*shape)
    scales = expert_scales(quantize_rows(layer.x, layer.map, power_of_two=False).scales, layer.map)
    right = gather_panels(layer.x, layer.map, power_of_two=False, scales_EB=scales)
    left = gather_panels((layer.dy * 1e6).roll(1, 0), layer.map, power_of_two=False)
    # What lies past the last panel must not matter: the largest code there is not a number.
    for panels in (left, right):
        panels.codes.view(torch.uint8)[layer.used // 128 :] = 0x7F
    out = torch.full((layer.num_experts, layer.d, layer.d), 3.0, device="cuda", dtype=dtype)
    expected = out.clone()
    fp8_launch.weight_grad(left, right, layer.map, out, accumulate=accumulate)
    fp8_reference.weight_grad(left, right, layer.map, expected, accumulate=accumulate)
    assert error(out, expected) < (2e-3 if dtype == torch.bfloat16 else 1e-3)
    assert torch.equal(out[-1], expected[-1])  # no rows: zeros, or as it was


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_backward_of_swiglu_equals_its_reference(shape: tuple[int, ...], power_of_two: bool) -> None:
    layer = Layer(*shape)
    capacity, n = layer.map.capacity, layer.n
    pre = torch.randn(2, capacity, n, device="cuda").bfloat16()
    dact = (torch.randn(capacity, n, device="cuda") * 1e-6).bfloat16()
    padding = layer.map.source_M < 0
    pre[:, padding], dact[padding] = 0, 0
    scales = torch.rand(layer.num_experts, n // 128, device="cuda") / 100 + 0.01
    given = (pre, dact, sort_weights(layer.weights, layer.map), scales, layer.map)
    ours, exact = (
        package.swiglu_grad(*given, power_of_two=power_of_two) for package in (fp8_swiglu_grad, fp8_reference)
    )
    used, panels = slice(layer.used), slice(layer.used // 128)
    assert error(ours.rows.scales[:, used], exact.rows.scales[:, used]) < 5e-3
    assert error(ours.panels.scales[panels], exact.panels.scales[panels]) < 5e-3
    assert error(ours.weight_parts[:, used], exact.weight_parts[:, used]) < 2e-3
    rows, expected_rows = (fp8_reference.rows_of(found.rows)[used] for found in (ours, exact))
    assert error(rows, expected_rows) < 1e-2
    values, expected_values = (
        (found.panels.codes.float() * found.panels.scales[:, :, None])[panels] for found in (ours, exact)
    )
    assert error(values, expected_values) < 1e-2
    # Their scales were given: codes stand for values.
    assert error(ours.act_panels.codes[panels].float(), exact.act_panels.codes[panels].float()) < 1e-2


def test_quantised_operands_are_as_defined() -> None:
    layer = Layer(*SHAPES[1])
    for recipe in (FP8_BLOCKWISE, POWERS):
        options = {"power_of_two": recipe is POWERS}
        rows, panels = (
            quantise(layer.x, layer.map, **options) for quantise in (quantize_rows, gather_panels)
        )
        plain, transposed = quantize_weight(layer.gate_up, **options)
        expected = quantize(layer.gate_up[1], recipe.forward.second)
        assert torch.equal(plain.scales[1], expected.scales_BB)
        assert torch.equal(plain.codes[1].float(), expected.codes_RC)
        assert torch.equal(plain.codes.view(torch.uint8).mT, transposed.codes.view(torch.uint8))
        sorted_x = layer.x.float()[(layer.map.source_M[: layer.used].clamp(min=0) // 2).long()]
        sorted_x[layer.map.source_M[: layer.used] < 0] = 0
        _assert_rows(rows, sorted_x, recipe)
        _assert_panels(panels, sorted_x, recipe)


def _assert_rows(rows: Codes, sorted_x: torch.Tensor, recipe: Recipe) -> None:
    used = slice(len(sorted_x))
    expected = quantize(sorted_x, recipe.forward.first)
    assert torch.equal(rows.scales[:, used].t(), expected.scales_BB)
    assert torch.equal(rows.codes[used].float(), expected.codes_RC)


def _assert_panels(panels: Codes, sorted_x: torch.Tensor, recipe: Recipe) -> None:
    used = slice(len(sorted_x) // 128)
    expected = quantize(sorted_x.t(), recipe.wgrad.first)
    seen = expected.scales_BB > 0
    assert torch.equal(panels.scales[used].t()[seen], expected.scales_BB[seen])
    codes = restore_tokens(panels.codes[used].float()).transpose(0, 1).reshape(sorted_x.shape[1], -1)
    assert torch.equal(codes, expected.codes_RC)


def test_running_again_gives_the_same_bits() -> None:
    layer = Layer(*SHAPES[2])
    for first, second in zip(layer.run(fused()), layer.run(fused()), strict=True):
        assert torch.equal(first, second)


def test_a_bound_on_rows_changes_nothing_until_it_is_broken() -> None:
    layer = Layer(*SHAPES[1])
    layer.ids[500:] = -1
    exact = layer.run(fused())
    for first, second in zip(layer.run(fused(max_rows=1000)), exact, strict=True):
        assert torch.equal(first, second)
    broken = layer.run(fused(max_rows=128))
    torch.cuda.synchronize()
    assert broken[0].isnan().all()


class Sink:
    def __init__(self, weight: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate = torch.full_like(weight, 3.0, dtype=torch.float32), accumulate

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.accumulate


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_go_to_their_sinks_in_fp32(accumulate: bool) -> None:
    layer = Layer(*SHAPES[1])
    layer.dy = (layer.dy * 1e6).contiguous()
    exact = layer.run(emulated())[3:]
    parameters = [torch.nn.Parameter(weight) for weight in (layer.gate_up, layer.down)]
    for parameter in parameters:
        parameter.grad_sink = Sink(parameter, accumulate)  # type: ignore[attr-defined]
    rows = Rows(layer.x, layer.weights, layer.ids)
    fused()(rows, ExpertWeights(*parameters)).backward(layer.dy)
    for parameter, expected in zip(parameters, exact, strict=True):
        assert parameter.grad is None
        found = parameter.grad_sink.buffer - (3.0 if accumulate else 0.0)  # type: ignore[attr-defined]
        assert error(found, expected) < 1e-2


def test_nothing_waits_for_the_host() -> None:
    layer = Layer(*SHAPES[1])
    layer.run(fused())
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run(fused())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_experts_with_the_recipe_take_the_kernels_unless_they_are_turned_off() -> None:
    layer = Layer(*SHAPES[1])
    policy = ExpertPolicy(recipe=FP8_BLOCKWISE, emulate=False)

    def chosen(rows: Rows, weights: ExpertWeights) -> torch.Tensor:
        return experts_mlp(rows, weights, policy._replace(emulate=True))

    with torch.no_grad():
        given = Rows(layer.x, layer.weights, layer.ids), ExpertWeights(layer.gate_up, layer.down)
        assert torch.equal(experts_mlp(*given, policy), fused()(*given))
        with kernels("torch"):
            assert torch.equal(chosen(*given), emulated()(*given))


def test_no_rows_give_no_output() -> None:
    layer = Layer(*SHAPES[0])
    rows = Rows(layer.x[:0], layer.weights[:0], layer.ids[:0])
    y = fused()(rows, ExpertWeights(layer.gate_up, layer.down))
    assert y.shape == (0, layer.d)
