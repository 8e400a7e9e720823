"""Experts in ``fp8_fast`` on a Hopper GPU: kernels equal their references, the layer equals the emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from fsdmoe.formats import FP8_FAST, Recipe
from fsdmoe.kernels.backend import has_fp8_kernels
from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.gluon import (
    experts_mlp_fp8_fast,
    fp8_fast_launch,
    fp8_fast_reference,
    fp8_swiglu_grad,
    quantize_weights,
)
from fsdmoe.kernels.operand_state import OperandState, register_history
from fsdmoe.kernels.quantized_linear import experts_mlp_quantized
from fsdmoe.kernels.triton.fp8_delayed import expert_peaks
from fsdmoe.kernels.triton.fp8_panels import gather_panels, order_tokens
from fsdmoe.kernels.triton.fp8_rows import Codes, expert_scales, quantize_tokens, sort_weights
from tests.behaviour.kernels.test_fp8_gpu import SHAPES, Layer, Sink, error, errors

pytestmark = pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
POWERS = FP8_FAST.with_power_of_two_scales()
NEAR = 2e-2
"""The emulation adds up in float32. The matrix unit's own sums, of about 14 bits, differ by 0.2 %, which
turns over codes of what is quantised next: about 1 % of its norm."""
BF16 = {"dtype": torch.bfloat16}
States = tuple[OperandState | None, OperandState | None]


def states(history: float) -> tuple[OperandState, OperandState]:
    """As after a step whose largest magnitudes were these; 0: before any."""
    owner = nn.Module()
    register_history(owner, 2)
    owner.cuda()
    owner.amax_history[:, 0] = history  # type: ignore[index, operator]
    found = (
        OperandState("gate_up", owner, 0, is_delayed=True),
        OperandState("down", owner, 2, is_delayed=True),
    )
    for state in found:
        state.known = {"input", "grad"} if history > 0 else set()
    return found


def fused(recipe: Recipe = FP8_FAST, watched: States = (None, None), **options: Any) -> Any:
    def compute(rows: Rows, weights: ExpertWeights) -> torch.Tensor:
        return experts_mlp(
            rows, weights, ExpertPolicy(recipe=recipe, emulate=False, states=watched), **options
        )

    return compute


def emulated(recipe: Recipe = FP8_FAST, watched: States = (None, None)) -> Any:
    def compute(rows: Rows, weights: ExpertWeights) -> torch.Tensor:
        return experts_mlp_quantized(rows, weights, ExpertPolicy(recipe=recipe, states=watched), recipe)

    return compute


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", [FP8_FAST, POWERS], ids=["float32", "power_of_two"])
def test_the_layer_equals_the_emulation(shape: tuple[int, ...], recipe: Recipe) -> None:
    layer = Layer(*shape)
    ours, exact = layer.run(fused(recipe)), layer.run(emulated(recipe))
    assert all(value < NEAR for value in errors(ours, exact).values())
    assert not ours[2][layer.ids < 0].any()
    # What is computed is fp8: bf16 is several times as far from it as the emulation is.
    assert min(errors(layer.run(experts_mlp_reference), ours).values()) > 2 * NEAR


@pytest.mark.parametrize("history", [0.0, 4.0], ids=["first step", "clipping"])
def test_delayed_scales_are_those_of_the_emulation(history: float) -> None:
    layer = Layer(*SHAPES[1])
    layer.dy = (layer.dy * 1e6).contiguous()
    own, theirs = states(history), states(history)
    ours, exact = layer.run(fused(watched=own)), layer.run(emulated(watched=theirs))
    assert all(value < NEAR for value in errors(ours, exact).values())
    for role, index in ((0, 1), (1, 0)):  # inputs of the second, gradients of the first projection
        found, expected = own[index].amax, theirs[index].amax
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found[role], expected[role], rtol=1e-2, atol=0.0)


def test_an_infinity_between_the_projections_is_not_clipped_by_delayed_scales() -> None:
    layer = Layer(*SHAPES[1])
    layer.x[1] *= 1e25  # whose SwiGLU overflows; forward has it
    assert layer.run(fused(watched=states(4.0)))[0][1].isnan().any()
    layer.x[1] *= 1e-13  # whose activation is finite, and its gradient is not
    layer.dy[1] *= 1e35
    y, dx, _, dgate_up, _ = layer.run(fused(watched=states(4.0)))
    assert y.isfinite().all()
    assert dx[1].isnan().any()
    assert dgate_up.isnan().any()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_matrix_products_equal_their_references(shape: tuple[int, ...]) -> None:
    layer = Layer(*shape)
    weights = quantize_weights(layer.gate_up, layer.down, whole=True)
    x, used = quantize_tokens(layer.x, layer.map, power_of_two=False), slice(layer.used)
    scales = torch.rand(layer.num_experts, device="cuda") / 50 + 0.01
    given = (x, layer.weights, weights.gate_up, scales, layer.map)
    (pre, act, peaks), (expected_pre, expected_act, expected_peaks) = (
        package.gate_up(*given, keep=True, **BF16) for package in (fp8_fast_launch, fp8_fast_reference)
    )
    assert error(pre[:, used], expected_pre[:, used]) < 4e-3
    assert error(peaks[:, used], expected_peaks[:, used]) < 4e-3
    assert error(act.codes[used].float(), expected_act.codes[used].float()) < 1e-2
    nothing_kept = fp8_fast_launch.gate_up(*given, keep=False, **BF16)
    assert nothing_kept[0] is None
    assert torch.equal(nothing_kept[1].codes[used].float(), act.codes[used].float())
    for weight, rows in ((weights.down, act), (weights.down_transposed, x)):
        y, expected = (
            p.project(rows, weight, layer.map, **BF16) for p in (fp8_fast_launch, fp8_fast_reference)
        )
        assert error(y[used], expected[used]) < 4e-3
    noted = torch.zeros((), device="cuda")
    peaks_E = expert_peaks(peaks, layer.map, noted)
    assert noted == peaks[:, used].max() == peaks_E.max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_weight_gradient_equals_its_reference(
    shape: tuple[int, ...], dtype: torch.dtype, accumulate: bool
) -> None:
    layer = Layer(*shape)

    def panels(x: torch.Tensor) -> Codes:
        scales = expert_scales(quantize_tokens(x, layer.map, power_of_two=False).scales, layer.map)
        found = gather_panels(x, layer.map, power_of_two=False, scales_EB=scales)
        # What lies past the last panel must not matter: the largest code there is not a number.
        found.codes.view(torch.uint8)[layer.used // 128 :] = 0x7F
        return found

    left, right = panels((layer.dy * 1e6).roll(1, 0)), panels(layer.x)
    out = torch.full((layer.num_experts, layer.d, layer.d), 3.0, device="cuda", dtype=dtype)
    expected = out.clone()
    fp8_fast_launch.weight_grad(left, right, layer.map, out, accumulate=accumulate)
    fp8_fast_reference.weight_grad(left, right, layer.map, expected, accumulate=accumulate)
    assert error(out, expected) < 4e-3
    assert torch.equal(out[-1], expected[-1])  # no rows: zeros, or as it was


@pytest.mark.parametrize("shape", SHAPES)
def test_the_backward_of_swiglu_equals_its_reference(shape: tuple[int, ...]) -> None:
    layer = Layer(*shape)
    capacity, n = layer.map.capacity, layer.n
    pre = torch.randn(2, capacity, n, device="cuda").bfloat16()
    dact = (torch.randn(capacity, n, device="cuda") * 1e-6).bfloat16()
    padding = layer.map.source_M < 0
    pre[:, padding], dact[padding] = 0, 0
    act_scales, dpre_scales = (torch.rand(layer.num_experts, device="cuda") / 100 + 0.01 for _ in range(2))
    dpre_scales = dpre_scales * 1e-6
    given = (pre, dact, sort_weights(layer.weights, layer.map), act_scales, layer.map)
    ours, exact = (
        package.swiglu_grad(*given, dpre_scales_E=dpre_scales)
        for package in (fp8_swiglu_grad, fp8_fast_reference)
    )
    used, panels = slice(layer.used), slice(layer.used // 128)
    assert error(ours.peaks[:, used], exact.peaks[:, used]) < 5e-3
    assert error(ours.weight_parts[:, used], exact.weight_parts[:, used]) < 2e-3
    assert error(ours.rows.codes[used].float(), exact.rows.codes[used].float()) < 1e-2
    assert error(ours.panels.codes[panels].float(), exact.panels.codes[panels].float()) < 1e-2
    assert error(ours.act_panels.codes[panels].float(), exact.act_panels.codes[panels].float()) < 1e-2
    # One quantisation serves both: the panels are the rows, turned.
    turned = order_tokens(ours.rows.codes.view(torch.uint8)[used].view(-1, 128, 2 * n).transpose(1, 2))
    assert torch.equal(turned, ours.panels.codes.view(torch.uint8)[panels])


def test_running_again_gives_the_same_bits() -> None:
    layer = Layer(*SHAPES[2])
    for first, second in zip(layer.run(fused()), layer.run(fused()), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_go_to_their_sinks_in_fp32(accumulate: bool) -> None:
    layer = Layer(*SHAPES[1])
    layer.dy = (layer.dy * 1e6).contiguous()
    exact = layer.run(emulated())[3:]
    parameters = [nn.Parameter(weight) for weight in (layer.gate_up, layer.down)]
    for parameter in parameters:
        parameter.grad_sink = Sink(parameter, accumulate)  # type: ignore[attr-defined]
    experts_mlp_fp8_fast(Rows(layer.x, layer.weights, layer.ids), *parameters, FP8_FAST).backward(layer.dy)
    for parameter, expected in zip(parameters, exact, strict=True):
        assert parameter.grad is None
        found = parameter.grad_sink.buffer - (3.0 if accumulate else 0.0)  # type: ignore[attr-defined]
        assert error(found, expected) < NEAR


def test_a_bound_on_rows_changes_nothing_until_it_is_broken() -> None:
    layer = Layer(*SHAPES[1])
    layer.ids[500:] = -1
    exact = layer.run(fused())
    for first, second in zip(layer.run(fused(max_rows=1000)), exact, strict=True):
        assert torch.equal(first, second)
    broken = layer.run(fused(max_rows=128))
    torch.cuda.synchronize()
    assert broken[0].isnan().all()


@pytest.mark.parametrize("history", [0.0, 4.0], ids=["first step", "later"])
def test_nothing_waits_for_the_host(history: float) -> None:
    layer, own = Layer(*SHAPES[1]), states(history)
    layer.run(fused(watched=own))
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run(fused(watched=own))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_rows_give_no_output() -> None:
    layer = Layer(*SHAPES[0])
    rows = Rows(layer.x[:0], layer.weights[:0], layer.ids[:0])
    assert experts_mlp_fp8_fast(rows, layer.gate_up, layer.down, FP8_FAST).shape == (0, layer.d)
