"""Experts in ``fp8_fast`` in Triton's interpreter, as in ``long_fp8_layer_cases``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.formats import FP8_FAST, Recipe, WeightScales, give_scales
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.gluon import (
    experts_mlp_fp8_fast,
    fp8_fast_launch,
    fp8_fast_reference,
    fp8_swiglu_grad,
    quantize_weights,
)
from fsdmoe.kernels.operand_state import OperandState, register_history, watch_of
from fsdmoe.kernels.quantize import quantize
from fsdmoe.kernels.quantized_linear import experts_mlp_quantized
from fsdmoe.kernels.triton.fp8_panels import gather_panels, restore_tokens
from fsdmoe.kernels.triton.fp8_rows import expert_scales, quantize_tokens
from tests.support.triton.long_fp8_layer_cases import (  # noqa: F401 (a fixture)
    D,
    E,
    _fp8_as_on_a_gpu,
    assert_close,
    check,
    draw,
    row_map,
)

pytestmark = pytest.mark.usefixtures("poisoned")
RECIPES = {"float32": FP8_FAST, "power_of_two": FP8_FAST.with_power_of_two_scales()}
States = tuple[OperandState, OperandState]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("project", "gate_up", "weight_grad"):
        monkeypatch.setattr(fp8_fast_launch, name, getattr(fp8_fast_reference, name))
    monkeypatch.setattr(fp8_swiglu_grad, "swiglu_grad", fp8_fast_reference.swiglu_grad)


def states(*, known: bool, history: float = 0.0) -> States:
    owner = nn.Module()
    register_history(owner, 2)
    owner.amax_history[:, 3] = history  # type: ignore[index, operator]
    found = (
        OperandState("gate_up", owner, 0, is_delayed=True),
        OperandState("down", owner, 2, is_delayed=True),
    )
    for state in found:
        state.known = {"input", "grad"} if known else set()
    return found


def run(
    inputs: tuple[torch.Tensor, ...],
    recipe: Recipe,
    watched: States | tuple[None, None] = (None, None),
    *,
    fused: bool,
    dy_scale: float = 1.0,
    **options: Any,
) -> list[torch.Tensor]:
    """y and the gradients of x, weights, gate_up and down."""
    x, weights, ids, gate_up, down = inputs
    leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
    if fused:
        watches = watch_of(watched[0]), watch_of(watched[1])
        y = experts_mlp_fp8_fast(
            Rows(leaves[0], leaves[1], ids), leaves[2], leaves[3], recipe, watches=watches, **options
        )
    else:
        rows, policy = Rows(leaves[0], leaves[1], ids), ExpertPolicy(recipe=recipe, states=watched)
        y = experts_mlp_quantized(rows, ExpertWeights(*leaves[2:]), policy, recipe)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) * dy_scale
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("kind", RECIPES)
def test_the_layer_equals_the_emulation(kind: str) -> None:
    inputs = draw()
    ours, exact = (run(inputs, RECIPES[kind], fused=fused) for fused in (True, False))
    assert_close(ours, exact)
    assert not ours[2][inputs[2] < 0].any()


@pytest.mark.parametrize("history", [0.0, 3.0], ids=["first step", "clipping"])
def test_delayed_scales_and_what_they_follow_from_are_those_of_the_emulation(history: float) -> None:
    inputs = draw()
    own, theirs = states(known=history > 0, history=history), states(known=history > 0, history=history)
    assert_close(run(inputs, FP8_FAST, own, fused=True), run(inputs, FP8_FAST, theirs, fused=False))
    for role, index in ((0, 1), (1, 0)):  # inputs of the second, gradients of the first projection
        found, expected = own[index].amax, theirs[index].amax
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found[role], expected[role], rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("known", [True, False], ids=["later step", "resumed"])
def test_an_infinity_between_the_projections_is_not_clipped_by_delayed_scales(known: bool) -> None:
    x, *others = draw()
    x[0] *= 1e25  # whose SwiGLU overflows; forward has it
    y = run((x, *others), FP8_FAST, states(known=known, history=3.0), fused=True)[0]
    assert y[0].isnan().any()
    x[0] *= 1e-13  # whose activation is finite, and its gradient is not
    given = (x, *others), FP8_FAST, states(known=known, history=3.0)
    y, dx, _, dgate_up, _ = run(*given, fused=True, dy_scale=1e30)
    assert y.isfinite().all()
    assert dx[0].isnan().any()
    assert dgate_up.isnan().any()


def test_a_step_without_gradients_notes_nothing() -> None:
    x, weights, ids, gate_up, down = draw()
    own = states(known=True, history=9.0)
    with torch.no_grad():
        watches = watch_of(own[0]), watch_of(own[1])
        y = experts_mlp_fp8_fast(Rows(x, weights, ids), gate_up, down, FP8_FAST, watches=watches)
    assert own[0].amax is None
    assert own[1].amax is None
    assert torch.equal(y, run((x, weights, ids, gate_up, down), FP8_FAST, own, fused=True)[0])


@pytest.mark.parametrize("kind", RECIPES)
def test_rows_have_a_scale_each_and_panels_that_of_their_expert(kind: str) -> None:
    x, _, ids, *_ = draw()
    found, rows = row_map(ids)
    options = {"power_of_two": kind == "power_of_two"}
    codes, scales = quantize_tokens(x, found, **options)
    of_expert = expert_scales(scales, found)
    panels = gather_panels(x, found, scales_EB=of_expert, **options)
    for expert, row in enumerate(rows):
        first, last = found.offsets[expert : expert + 2].tolist()
        here = slice(first, first + len(row))
        check(codes[here], scales[:, here].t(), x[row], RECIPES[kind].forward.first)
        assert not codes[here.stop : last].float().any()
        assert not scales[:, here.stop : last].any()
        padded = torch.zeros(last - first, D)
        padded[: len(row)] = x[row]
        panel = restore_tokens(panels.codes[first // 128 : last // 128].float())
        by_channel = panel.transpose(0, 1).reshape(D, -1)
        check(by_channel, of_expert[expert][:, None], padded.t(), RECIPES[kind].wgrad.second)


@pytest.mark.parametrize("kind", RECIPES)
def test_weights_have_a_scale_an_expert_both_ways_round(kind: str) -> None:
    *_, gate_up, down = draw()
    found = quantize_weights(gate_up, down, power_of_two=kind == "power_of_two", whole=True)
    for expert in range(E):
        expected = quantize(gate_up[expert], RECIPES[kind].forward.second)
        assert torch.equal(found.gate_up.scales[expert], expected.scales_BB)
        assert torch.equal(found.gate_up.codes[expert].float(), expected.codes_RC)
    for plain, turned in ((found.gate_up, found.gate_up_transposed), (found.down, found.down_transposed)):
        assert torch.equal(plain.codes.float().mT, turned.codes.float())


class Sink:
    def __init__(self, weight: torch.Tensor) -> None:
        self.buffer = torch.full(weight.shape, 3.0)

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, False


def test_weights_that_came_quantised_or_were_quantised_beforehand_give_the_same() -> None:
    inputs = draw()
    expected = run(inputs, FP8_FAST, fused=True)
    quantized = quantize_weights(*inputs[3:], whole=True)
    for ours, wanted in zip(run(inputs, FP8_FAST, fused=True, quantized=quantized), expected, strict=True):
        assert torch.equal(ours, wanted)
    x, weights, ids, *_ = inputs
    parameters = []
    for codes, scales in quantized[:2]:
        parameter = nn.Parameter(codes)
        give_scales(parameter, WeightScales(scales, tuple(codes.shape[1:])))  # type: ignore[arg-type]
        parameter.grad_sink = Sink(parameter)  # type: ignore[attr-defined]
        parameters.append(parameter)
    x.requires_grad_()
    y = experts_mlp_fp8_fast(Rows(x, weights, ids), *parameters, FP8_FAST)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(y, expected[0])
    assert torch.equal(x.grad, expected[1])  # type: ignore[arg-type]
    for parameter, wanted in zip(parameters, expected[3:], strict=True):
        assert torch.equal(parameter.grad_sink.buffer, wanted)  # type: ignore[attr-defined]
