"""``experts_mlp_fp8``: the experts' compute on Hopper, all products in fp8, as one differentiable function.

The recipe is ``fp8_blockwise`` (see ``precision/recipes.py``), the result that of ``experts_mlp_quantized``
up to the order of sums::

    forward    map rows -> permute and quantise x -> gate_up (SwiGLU x weight, quantised) -> down -> combine
    backward   permute and quantise dy -> d act -> SwiGLU backward, quantised as rows and as panels
               panels of dy -> d down;   panels of x -> d gate_up;   d x -> combine

As in bf16 (``triton/swiglu_mlp.py``) an id of -1 contributes nothing, x, the pre-activation in bf16 and the
map are kept for backward (and some scales: those of panels follow from forward), weight gradients go straight
to a parameter's sink, and nothing waits for the device.

Where the codes of the two weights come from::

    quantized      the caller made them (``quantize_weights``), once for all micro-batches of a step
    scales         the weights are codes already (``QuantizedWeight``); backward transposes them, unless they
                   are kept so too
    else           made here, and anew in backward, transposed: kept, those of all layers would stay in memory

Sizes: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdmoe.kernels.gluon import fp8_launch as gemm
from fsdmoe.kernels.gluon import fp8_swiglu_grad as swiglu
from fsdmoe.kernels.grad_sink import GradSink, sink_of
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import Codes, expert_scales, quantize_rows, sort_weights, sum_parts_
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8
from fsdmoe.kernels.triton.fp8_weights import QuantizedExpertWeights, quantize_weight
from fsdmoe.kernels.triton.permute_kernels import combine_rows
from fsdmoe.kernels.triton.quantize_kernels import turn_codes_triton
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu_mlp import InputGrads
from fsdmoe.kernels.triton.weight_grad import WeightGrad, grad_target
from fsdmoe.precision.formats import Recipe, blockwise_scale
from fsdmoe.precision.quantized_weight import WeightScales, scales_of

_MAX_EXPERTS = 1024


def supports_fp8(
    recipe: Recipe, x_RD: Tensor, gate_up_E2ND: Tensor, down_EDN: Tensor, activation: str
) -> bool:
    """Whether these tensors can take this path: bf16, a recipe in E4M3, sizes in whole blocks, SwiGLU."""
    num_experts, d, n = down_EDN.shape
    return (
        blockwise_scale(recipe) is not None
        and activation == "swiglu"
        and x_RD.is_cuda
        and x_RD.dtype == torch.bfloat16
        and (_are_plain(gate_up_E2ND, down_EDN) or _are_codes(gate_up_E2ND, down_EDN))
        and d % BLOCK == n % BLOCK == 0
        and num_experts <= _MAX_EXPERTS
        and gate_up_E2ND.is_contiguous()
        and down_EDN.is_contiguous()
    )


def _are_plain(*weights: Tensor) -> bool:
    return all(weight.dtype == torch.bfloat16 for weight in weights)


def _are_codes(*weights: Tensor) -> bool:
    """Quantised by the recipe before they came."""
    blocks = all(
        (found := scales_of(weight)) is not None and found.block == (BLOCK, BLOCK) for weight in weights
    )
    in_fp8 = all(weight.dtype == FP8 for weight in weights)
    return blocks and in_fp8


class Kept(NamedTuple):
    """What backward needs of forward beside the inputs."""

    pre_2MN: Tensor
    x_scales_EB: Tensor
    act_scales_EB: Tensor
    """Of panels: the largest of an expert's row scales."""
    row_map: RowMap


def forward(
    x_RD: Tensor,
    weights_RK: Tensor,
    ids_RK: Tensor,
    weights: tuple[Codes, Codes],
    *,
    keep: bool,
    max_rows: int | None,
    power_of_two: bool,
) -> tuple[Tensor, Kept | None]:
    """``weights``: gate_up ``[E, 2N, D]`` and down ``[E, D, N]``."""
    gate_up, down = weights
    row_map = build_row_map(ids_RK, down.codes.shape[0], align=BLOCK, max_rows=max_rows)
    x = quantize_rows(x_RD, row_map, power_of_two=power_of_two)
    pre_2MN, act = gemm.gate_up(
        x, weights_RK, gate_up, row_map, keep=keep, power_of_two=power_of_two, dtype=x_RD.dtype
    )
    x_scales = x.scales
    del x
    y_RD = combine_rows(gemm.project(act, down, row_map, dtype=x_RD.dtype), row_map)
    if pre_2MN is None:
        return y_RD, None
    scales = expert_scales(x_scales, row_map), expert_scales(act.scales, row_map)
    return y_RD, Kept(pre_2MN, *scales, row_map)


def backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    weights_RK: Tensor,
    weights: tuple[Codes, Codes],
    kept: Kept,
    into: tuple[WeightGrad | None, WeightGrad | None],
    *,
    want_x: bool,
    power_of_two: bool,
) -> InputGrads:
    """``weights``, transposed: gate_up ``[E, D, 2N]`` and down ``[E, N, D]``. Gradients of x and of the
    routing weights; those of gate_up and down are written to ``into``."""
    pre_2MN, x_scales_EB, act_scales_EB, row_map = kept
    gate_up, down = weights
    dy = quantize_rows(dy_RD, row_map, power_of_two=power_of_two)
    dact_MN = gemm.project(dy, down, row_map, dtype=x_RD.dtype)
    del dy
    weights_M = sort_weights(weights_RK, row_map)
    found = swiglu.swiglu_grad(pre_2MN, dact_MN, weights_M, act_scales_EB, row_map, power_of_two=power_of_two)
    del dact_MN
    dweights_RK = torch.zeros(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
    sum_parts_(found.weight_parts, row_map, dweights_RK)
    # Each panel is dropped once used: they are the largest tensors here.
    dpre, dpre_panels, act_panels = found.rows, found.panels, found.act_panels
    del found
    if into[1] is not None:
        dy_panels = gather_panels(dy_RD, row_map, power_of_two=power_of_two)
        gemm.weight_grad(dy_panels, act_panels, row_map, into[1].buffer, accumulate=into[1].accumulate)
        del dy_panels
    del act_panels
    if into[0] is not None:
        x_panels = gather_panels(x_RD, row_map, power_of_two=power_of_two, scales_EB=x_scales_EB)
        gemm.weight_grad(dpre_panels, x_panels, row_map, into[0].buffer, accumulate=into[0].accumulate)
        del x_panels
    del dpre_panels
    if not want_x:
        return InputGrads(None, dweights_RK)
    return InputGrads(
        combine_rows(gemm.project(dpre, gate_up, row_map, dtype=x_RD.dtype), row_map), dweights_RK
    )


Scales = tuple[WeightScales | None, WeightScales | None]


def _plain_codes(weights: tuple[Tensor, Tensor], given: Scales, power_of_two: bool) -> tuple[Codes, Codes]:
    """For forward."""

    def codes(weight: Tensor, found: WeightScales | None) -> Codes:
        if found is not None:
            return Codes(weight.detach(), found.scales)
        return quantize_weight(weight, power_of_two=power_of_two, turned=False)[0]

    return codes(weights[0], given[0]), codes(weights[1], given[1])


def _turned_codes(weights: tuple[Tensor, Tensor], given: Scales, power_of_two: bool) -> tuple[Codes, Codes]:
    """For backward."""

    def codes(weight: Tensor, found: WeightScales | None) -> Codes:
        if found is not None:
            turned = turn_codes_triton(weight.detach()) if found.turned is None else found.turned
            return Codes(turned, found.scales.mT.contiguous())
        return quantize_weight(weight, power_of_two=power_of_two, plain=False)[1]

    return codes(weights[0], given[0]), codes(weights[1], given[1])


def _weight_sinks(weights: tuple[Tensor, Tensor], given: Scales) -> tuple[GradSink | None, GradSink | None]:
    """Where gradients go; codes need such a place."""
    for weight, found in zip(weights, given, strict=True):
        if found is not None and sink_of(weight) is None and weight.requires_grad:
            raise RuntimeError("the gradient of a quantised weight has no place to go: it is not sharded")
    return sink_of(weights[0]), sink_of(weights[1])


class _Options(NamedTuple):
    sinks: tuple[GradSink | None, GradSink | None]
    scales: Scales
    """Of weights that are codes."""
    max_rows: int | None
    power_of_two: bool


class _ExpertsMLPInFP8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weights_RK: Tensor,
        ids_RK: Tensor,
        gate_up_E2ND: Tensor,
        down_EDN: Tensor,
        quantized: QuantizedExpertWeights | None,
        options: _Options,
    ) -> Tensor:
        sinks, given, max_rows, power_of_two = options
        weights = gate_up_E2ND, down_EDN
        plain = _plain_codes(weights, given, power_of_two) if quantized is None else quantized[:2]
        keep = any(ctx.needs_input_grad)
        y_RD, kept = forward(
            x_RD, weights_RK, ids_RK, plain, keep=keep, max_rows=max_rows, power_of_two=power_of_two
        )
        if kept is not None:
            turned = () if quantized is None else (*quantized.gate_up_transposed, *quantized.down_transposed)
            ctx.save_for_backward(x_RD, weights_RK, *weights, *kept[:3], *kept.row_map, *turned)
            ctx.sinks, ctx.scales, ctx.power_of_two = sinks, given, power_of_two
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weights_RK, gate_up_E2ND, down_EDN, pre, x_scales, act_scales, *rest = ctx.saved_tensors
        row_map, turned = RowMap(*rest[:5]), rest[5:]
        want_x, want_weights, _, want_gate_up, want_down, *_ = ctx.needs_input_grad
        into = (
            grad_target(gate_up_E2ND, ctx.sinks[0], want_gate_up),
            grad_target(down_EDN, ctx.sinks[1], want_down),
        )
        dx_RD, dweights_RK, _ = backward(
            dy_RD.contiguous(),
            x_RD,
            weights_RK,
            (Codes(*turned[:2]), Codes(*turned[2:]))
            if turned
            else _turned_codes((gate_up_E2ND, down_EDN), ctx.scales, ctx.power_of_two),
            Kept(pre, x_scales, act_scales, row_map),
            into,
            want_x=want_x,
            power_of_two=ctx.power_of_two,
        )
        returned = [
            target.buffer if target is not None and sink is None else None
            for target, sink in zip(into, ctx.sinks, strict=True)
        ]
        dweights = dweights_RK.to(weights_RK.dtype) if want_weights else None
        return dx_RD, dweights, None, returned[0], returned[1], None, None


def experts_mlp_fp8(
    x_RD: Tensor,
    weights_RK: Tensor,
    ids_RK: Tensor,
    gate_up_E2ND: Tensor,
    down_EDN: Tensor,
    recipe: Recipe,
    *,
    max_rows: int | None = None,
    quantized: QuantizedExpertWeights | None = None,
) -> Tensor:
    """The experts' output for every row; differentiable in x, weights, gate_up and down.

    ``max_rows`` bounds how many ids are not -1; one that proves too small gives NaN, not a partial sum.
    ``quantized``: the two weights as ``quantize_weights`` has them, by the recipe's kind of scale; gradients
    go to the weights all the same."""
    power_of_two = blockwise_scale(recipe) == "power_of_two"
    x_RD, weights_RK, ids_RK = x_RD.contiguous(), weights_RK.contiguous(), ids_RK.contiguous()
    given = x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN
    scales = scales_of(gate_up_E2ND), scales_of(down_EDN)
    if not torch.is_grad_enabled():  # which the function itself is not told
        weights = gate_up_E2ND, down_EDN
        plain = _plain_codes(weights, scales, power_of_two) if quantized is None else quantized[:2]
        y_RD, _ = forward(
            x_RD, weights_RK, ids_RK, plain, keep=False, max_rows=max_rows, power_of_two=power_of_two
        )
        return y_RD
    sinks = _weight_sinks((gate_up_E2ND, down_EDN), scales)
    return _ExpertsMLPInFP8.apply(*given, quantized, _Options(sinks, scales, max_rows, power_of_two))
