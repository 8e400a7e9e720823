"""``experts_mlp_fp8_fast``: the experts' compute on Hopper by the recipe ``fp8_fast``, as one differentiable
function; the result is that of ``experts_mlp_quantized`` up to the order of sums, and the matrix unit's own.

    forward    map rows -> permute and quantise x -> gate_up (SwiGLU x weight, quantised) -> down -> combine
    backward   permute and quantise dy -> d act -> SwiGLU backward, quantised as rows and as panels
               panels of dy -> d down;   panels of x -> d gate_up;   d x -> combine

A scale leaves a product's inner loop where it is one for all that is contracted. So rows of x and of dy have
one each where they meet a weight; where tokens are contracted, in weight gradients, they are quantised again,
with an expert's own, the largest of its rows'. What passes between the projections has one scale from
beginning to end, and its codes serve both products: delayed, since a tile of it is quantised before the other
tiles are known. Without a history (a first step) it is made twice, first to measure it.

What is kept, sinks, ``max_rows`` and codes of weights are as in ``fp8_mlp``.
Sizes: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdmoe.formats import Recipe, fast_scale, scales_of, weight_version
from fsdmoe.kernels.expert_operands import Rows
from fsdmoe.kernels.gluon import fp8_fast_launch as gemm
from fsdmoe.kernels.gluon import fp8_swiglu_grad as swiglu
from fsdmoe.kernels.gluon.fp8_mlp import Scales, plain_codes, turned_codes, weight_sinks
from fsdmoe.kernels.gluon.fp8_swiglu_grad import SwigluGrad
from fsdmoe.kernels.grad_sink import GradSink
from fsdmoe.kernels.operand_state import UNWATCHED, Role, Watch
from fsdmoe.kernels.triton.fp8_delayed import delayed_scales, expert_peaks
from fsdmoe.kernels.triton.fp8_panels import gather_panels
from fsdmoe.kernels.triton.fp8_rows import Codes, expert_scales, quantize_tokens, sort_weights, sum_parts_
from fsdmoe.kernels.triton.fp8_scale import BLOCK
from fsdmoe.kernels.triton.fp8_weights import QuantizedExpertWeights, whole_scales
from fsdmoe.kernels.triton.permute_kernels import combine_rows
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu_mlp import InputGrads
from fsdmoe.kernels.triton.weight_grad import WeightGrad, grad_target

Watches = tuple[Watch, Watch]
"""Of the two projections; the activation is the second one's input, d pre the first one's gradient."""


Made = TypeVar("Made")


class FastScales(NamedTuple):
    """Where scales come from."""

    watches: Watches
    power_of_two: bool


class KeptFast(NamedTuple):
    """What backward needs of forward beside the inputs."""

    pre_2MN: Tensor
    x_scales_E1: Tensor
    act_scales_E: Tensor
    row_map: RowMap


def _between(
    make: Callable[[Tensor], tuple[Made, Tensor]],
    watch: Watch,
    role: Role,
    row_map: RowMap,
    *,
    power_of_two: bool,
) -> tuple[Made, Tensor]:
    """Something that passes between the projections, and its scales ``[E]``. ``make`` is given scales, and
    tells the largest magnitudes ``[N/128, M]`` too."""
    device = row_map.offsets.device
    history_H, is_known = watch.past(role)
    noted = watch.place(role, device)
    if is_known:
        scales_E = delayed_scales(history_H, None, row_map, power_of_two=power_of_two)
        made, peaks = make(scales_E)
        expert_peaks(peaks, row_map, noted, scales_E)
        return made, scales_E
    _, peaks = make(torch.ones(row_map.num_experts, device=device))
    peaks_E = expert_peaks(peaks, row_map, noted)
    scales_E = delayed_scales(history_H, peaks_E, row_map, power_of_two=power_of_two)
    return make(scales_E)[0], scales_E


def _activation(
    x: Codes,
    weights_RK: Tensor,
    gate_up: Codes,
    row_map: RowMap,
    scales_E: Tensor,
    *,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor | None, Codes], Tensor]:
    pre_2MN, act, peaks = gemm.gate_up(x, weights_RK, gate_up, scales_E, row_map, keep=keep, dtype=dtype)
    return (pre_2MN, act), peaks


def _swiglu_grad(
    pre_2MN: Tensor,
    dact_MN: Tensor,
    weights_M: Tensor,
    act_scales_E: Tensor,
    row_map: RowMap,
    scales_E: Tensor,
) -> tuple[SwigluGrad, Tensor]:
    made = swiglu.swiglu_grad(pre_2MN, dact_MN, weights_M, act_scales_E, row_map, dpre_scales_E=scales_E)
    assert made.peaks is not None
    return made, made.peaks


def forward(
    x_RD: Tensor,
    weights_RK: Tensor,
    ids_RK: Tensor,
    weights: tuple[Codes, Codes],
    scales: FastScales,
    *,
    keep: bool,
    max_rows: int | None,
) -> tuple[Tensor, KeptFast | None]:
    """``weights``: gate_up ``[E, 2N, D]`` and down ``[E, D, N]``."""
    (gate_up, down), (watches, power_of_two) = weights, scales
    row_map = build_row_map(ids_RK, down.codes.shape[0], align=BLOCK, max_rows=max_rows)
    x = quantize_tokens(x_RD, row_map, power_of_two=power_of_two)
    make = partial(_activation, x, weights_RK, gate_up, row_map, keep=keep, dtype=x_RD.dtype)
    (pre_2MN, act), act_scales_E = _between(make, watches[1], "input", row_map, power_of_two=power_of_two)
    x_scales = x.scales
    del x, make
    y_RD = combine_rows(gemm.project(act, down, row_map, dtype=x_RD.dtype), row_map)
    if pre_2MN is None:
        return y_RD, None
    return y_RD, KeptFast(pre_2MN, expert_scales(x_scales, row_map), act_scales_E, row_map)


def backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    weights_RK: Tensor,
    weights: tuple[Codes, Codes],
    kept: KeptFast,
    into: tuple[WeightGrad | None, WeightGrad | None],
    scales: FastScales,
    *,
    want_x: bool,
) -> InputGrads:
    """``weights``, transposed: gate_up ``[E, D, 2N]`` and down ``[E, N, D]``. Gradients of x and of the
    routing weights; those of gate_up and down are written to ``into``."""
    pre_2MN, x_scales_E1, act_scales_E, row_map = kept
    (gate_up, down), (watches, power_of_two) = weights, scales
    dy = quantize_tokens(dy_RD, row_map, power_of_two=power_of_two)
    dact_MN = gemm.project(dy, down, row_map, dtype=x_RD.dtype)
    dy_scales_E1 = expert_scales(dy.scales, row_map)
    del dy
    weights_M = sort_weights(weights_RK, row_map)
    make = partial(_swiglu_grad, pre_2MN, dact_MN, weights_M, act_scales_E, row_map)
    found, _ = _between(make, watches[0], "grad", row_map, power_of_two=power_of_two)
    del dact_MN, make
    dweights_RK = torch.zeros(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
    sum_parts_(found.weight_parts, row_map, dweights_RK)
    # Each panel is dropped once used: they are the largest tensors here.
    dpre, dpre_panels, act_panels = found.rows, found.panels, found.act_panels
    del found
    if into[1] is not None:
        dy_panels = gather_panels(dy_RD, row_map, power_of_two=power_of_two, scales_EB=dy_scales_E1)
        gemm.weight_grad(dy_panels, act_panels, row_map, into[1].buffer, accumulate=into[1].accumulate)
        del dy_panels
    del act_panels
    if into[0] is not None:
        x_panels = gather_panels(x_RD, row_map, power_of_two=power_of_two, scales_EB=x_scales_E1)
        gemm.weight_grad(dpre_panels, x_panels, row_map, into[0].buffer, accumulate=into[0].accumulate)
        del x_panels
    del dpre_panels
    if not want_x:
        return InputGrads(None, dweights_RK)
    return InputGrads(
        combine_rows(gemm.project(dpre, gate_up, row_map, dtype=x_RD.dtype), row_map), dweights_RK
    )


def _plain_codes(weights: tuple[Tensor, Tensor], given: Scales, power_of_two: bool) -> tuple[Codes, Codes]:
    wholes = [
        _scales_of_experts(weight, power_of_two) if found is None else None
        for weight, found in zip(weights, given, strict=True)
    ]
    return plain_codes(weights, given, power_of_two, (wholes[0], wholes[1]))


def _scales_of_experts(weight_EAB: Tensor, power_of_two: bool) -> Tensor:
    """Of a weight that stays in memory: found once for as long as it does not change."""
    version = weight_version(weight_EAB)
    key, found = getattr(weight_EAB, "fp8_scales", (None, None))
    if found is not None and version is not None and key == (version, power_of_two):
        return found
    made = whole_scales(weight_EAB.detach(), power_of_two=power_of_two)
    if version is not None:
        weight_EAB.fp8_scales = (version, power_of_two), made  # type: ignore[attr-defined]
    return made


class _FastOptions(NamedTuple):
    sinks: tuple[GradSink | None, GradSink | None]
    scales: Scales
    """Of weights that are codes."""
    max_rows: int | None
    others: FastScales
    """All other scales."""


class _ExpertsMLPInFP8Fast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weights_RK: Tensor,
        ids_RK: Tensor,
        gate_up_E2ND: Tensor,
        down_EDN: Tensor,
        quantized: QuantizedExpertWeights | None,
        options: _FastOptions,
    ) -> Tensor:
        _, given, max_rows, others = options
        weights = gate_up_E2ND, down_EDN
        plain = _plain_codes(weights, given, others.power_of_two) if quantized is None else quantized[:2]
        keep = any(ctx.needs_input_grad)
        y_RD, kept = forward(x_RD, weights_RK, ids_RK, plain, others, keep=keep, max_rows=max_rows)
        if kept is not None:
            turned = () if quantized is None else (*quantized.gate_up_transposed, *quantized.down_transposed)
            wholes = plain[0].scales, plain[1].scales
            ctx.save_for_backward(x_RD, weights_RK, *weights, *wholes, *kept[:3], *kept.row_map, *turned)
            ctx.options = options
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weights_RK, gate_up_E2ND, down_EDN, *rest = ctx.saved_tensors
        wholes, (pre, x_scales, act_scales) = (rest[0], rest[1]), rest[2:5]
        row_map, turned, options = RowMap(*rest[5:10]), rest[10:], ctx.options
        want_x, want_weights, _, want_gate_up, want_down, *_ = ctx.needs_input_grad
        into = (
            grad_target(gate_up_E2ND, options.sinks[0], want_gate_up),
            grad_target(down_EDN, options.sinks[1], want_down),
        )
        dx_RD, dweights_RK, _ = backward(
            dy_RD.contiguous(),
            x_RD,
            weights_RK,
            (Codes(*turned[:2]), Codes(*turned[2:]))
            if turned
            else turned_codes((gate_up_E2ND, down_EDN), options.scales, options.others.power_of_two, wholes),
            KeptFast(pre, x_scales, act_scales, row_map),
            into,
            options.others,
            want_x=want_x,
        )
        returned = [
            target.buffer if target is not None and sink is None else None
            for target, sink in zip(into, options.sinks, strict=True)
        ]
        dweights = dweights_RK.to(weights_RK.dtype) if want_weights else None
        return dx_RD, dweights, None, returned[0], returned[1], None, None


def experts_mlp_fp8_fast(
    rows: Rows,
    gate_up_E2ND: Tensor,
    down_EDN: Tensor,
    recipe: Recipe,
    *,
    watches: Watches = (UNWATCHED, UNWATCHED),
    max_rows: int | None = None,
    quantized: QuantizedExpertWeights | None = None,
) -> Tensor:
    """The experts' output for every row; differentiable in x, weights, gate_up and down.

    ``watches``: of the two projections, whose delayed scales they know; without them, what passes between is
    made twice in every call. ``max_rows`` and ``quantized`` (with a scale for each whole matrix) are those of
    ``experts_mlp_fp8``."""
    power_of_two = fast_scale(recipe) == "power_of_two"
    x_RD, weights_RK, ids_RK = (tensor.contiguous() for tensor in rows)
    weights, others = (gate_up_E2ND, down_EDN), FastScales(watches, power_of_two)
    scales = scales_of(gate_up_E2ND), scales_of(down_EDN)
    if not torch.is_grad_enabled():  # which the function itself is not told
        plain = _plain_codes(weights, scales, power_of_two) if quantized is None else quantized[:2]
        return forward(x_RD, weights_RK, ids_RK, plain, others, keep=False, max_rows=max_rows)[0]
    options = _FastOptions(weight_sinks(weights, scales), scales, max_rows, others)
    return _ExpertsMLPInFP8Fast.apply(x_RD, weights_RK, ids_RK, *weights, quantized, options)
