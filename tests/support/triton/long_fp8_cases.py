"""More of ``long_fp8_layer_cases``."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.gluon import experts_mlp_fp8
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import expert_scales, quantize_rows
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.precision.formats import FP8_BLOCKWISE
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales
from tests.support.fp8_reference import restore_tokens
from tests.support.triton.long_fp8_layer_cases import (  # noqa: F401 (fixtures)
    RECIPES,
    D,
    K,
    _fp8_as_on_a_gpu,
    _stand_ins,
    assert_close,
    check,
    check_rows,
    draw,
    row_map,
    run,
)

pytestmark = pytest.mark.usefixtures("poisoned")
POLICY = ExpertPolicy(recipe=FP8_BLOCKWISE)


def test_rows_with_scales_in_float32_are_quantised_as_defined() -> None:
    check_rows("float32")


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("top_k", [1, K])
def test_layers_of_either_kind_of_scale_equal_the_emulation(kind: str, top_k: int) -> None:
    inputs = draw(top_k=top_k)
    ours, exact = (run(inputs, RECIPES[kind], fused=fused) for fused in (True, False))
    assert_close(ours, exact)
    assert not ours[2][inputs[2] < 0].any()


@pytest.mark.parametrize("kind", RECIPES)
def test_panels_are_quantised_as_defined(kind: str) -> None:
    x, _, ids, *_ = draw()
    found, rows = row_map(ids)
    options = {"power_of_two": kind == "power_of_two"}
    by_channel = gather_panels(x, found, **options)
    of_expert = expert_scales(quantize_rows(x, found, **options).scales, found)
    by_expert = gather_panels(x, found, scales_EB=of_expert, **options)
    wgrad = RECIPES[kind].wgrad
    for expert, row in enumerate(rows):
        panels = slice(*(found.offsets[expert : expert + 2] // 128).tolist())
        padded = torch.zeros((panels.stop - panels.start) * 128, D)
        padded[: len(row)] = x[row]
        channel_codes, expert_codes = (
            restore_tokens(panel.codes[panels].float()).transpose(0, 1).reshape(D, -1)
            for panel in (by_channel, by_expert)
        )
        check(channel_codes, by_channel.scales[panels].t(), padded.t(), wgrad.first)
        check(expert_codes, of_expert[expert][:, None], padded.t(), wgrad.second)


def test_a_bound_on_rows_changes_nothing_until_it_is_broken() -> None:
    inputs = draw(200)
    inputs[2][70:] = -1
    expected = run(inputs, FP8_BLOCKWISE, fused=True)
    num_rows = int((inputs[2] >= 0).sum())
    for found, wanted in zip(
        run(inputs, FP8_BLOCKWISE, fused=True, max_rows=num_rows), expected, strict=True
    ):
        assert torch.equal(found, wanted)
    with torch.no_grad():
        x, weights, _, gate_up, down = inputs
        rows = Rows(x, weights, torch.zeros_like(inputs[2]))
        broken = experts_mlp_fp8(rows, ExpertWeights(gate_up, down), POLICY, max_rows=128)
    assert broken.isnan().all()


class Sink:
    def __init__(self, weight: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate = torch.full(weight.shape, 3.0), accumulate

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.accumulate


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_go_to_their_sinks(accumulate: bool) -> None:
    inputs = draw()
    *_, dgate_up, ddown = run(inputs, FP8_BLOCKWISE, fused=True)
    x, weights, ids, *matrices = inputs
    parameters = [torch.nn.Parameter(matrix) for matrix in matrices]
    for parameter in parameters:
        parameter.grad_sink = Sink(parameter, accumulate)  # type: ignore[attr-defined]
    y = experts_mlp_fp8(Rows(x, weights, ids), ExpertWeights(*parameters), POLICY)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    for parameter, expected in zip(parameters, (dgate_up, ddown), strict=True):
        assert parameter.grad is None
        wanted = expected + (3.0 if accumulate else 0.0)
        torch.testing.assert_close(parameter.grad_sink.buffer, wanted)  # type: ignore[attr-defined]


def test_weights_that_came_quantised_give_the_same() -> None:
    inputs = draw()
    y, dx, _, *grads = run(inputs, FP8_BLOCKWISE, fused=True)
    x, weights, ids, *matrices = inputs
    parameters = []
    for matrix in matrices:
        (codes, scales), _ = quantize_weight(matrix, power_of_two=False)
        parameter = QuantizedWeight(codes, scales=WeightScales(scales, (128, 128)))
        parameter.grad_sink = Sink(parameter, False)  # type: ignore[attr-defined]
        parameters.append(parameter)
    x.requires_grad_()
    ours = experts_mlp_fp8(Rows(x, weights, ids), ExpertWeights(*parameters), POLICY)
    ours.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(ours, y)
    assert torch.equal(x.grad, dx)  # type: ignore[arg-type]
    for parameter, expected in zip(parameters, grads, strict=True):
        assert torch.equal(parameter.grad_sink.buffer, expected)  # type: ignore[attr-defined]
    del parameters[0].grad_sink
    with pytest.raises(RuntimeError, match="no place to go"):
        experts_mlp_fp8(Rows(x, weights, ids), ExpertWeights(*parameters), POLICY)


def test_no_rows_give_no_output_and_no_gradient() -> None:
    inputs = draw()
    empty = (inputs[0][:0], inputs[1][:0], inputs[2][:0], *inputs[3:])
    y, dx, _, dgate_up, ddown = run(empty, FP8_BLOCKWISE, fused=True)
    assert y.shape == dx.shape == (0, D)
    assert not dgate_up.any()
    assert not ddown.any()
