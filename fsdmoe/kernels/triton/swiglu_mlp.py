"""``experts_mlp_triton``: the expert layer's local compute on Hopper in bf16, as one differentiable function.

    y_r = Σ_k down[e] (p · silu(gate[e] x_r) · up[e] x_r),   e = ids[r, k], p = weights[r, k], summed in fp32

    forward    map rows -> [permute x] -> gate_up (SwiGLU × weight) -> down -> combine
    backward   permute dy -> d act -> SwiGLU backward -> d down; permute x -> d gate_up; d x -> combine

gpt-oss's clamped activation takes SwiGLU's place on request, and gate_up may have a bias. One of the second
projection is a narrow product of its own (``expert_mlp.py``): it needs no activation.

An id of -1 contributes nothing. Only x, the router weights, the pre-activation (unless it is recomputed) and
the row map are kept for backward. Weight gradients go straight to a parameter's gradient sink where it has
one. Nothing here waits for the device, so a CUDA graph can capture it.

Legend: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fsdmoe.kernels.grad_sink import GradSink, deliver, sink_of
from fsdmoe.kernels.late_grads import LateGrads
from fsdmoe.kernels.triton.grouped_gemm import GateUp, gate_up, project
from fsdmoe.kernels.triton.launch import has_bulk_copies
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import swiglu_backward_
from fsdmoe.kernels.triton.tiles import LayerTiles, grad_tile, tiles_for
from fsdmoe.kernels.triton.weight_grad import WeightGrad, bias_grad, grad_target, weight_grad

_MAX_EXPERTS = 1024
ACTIVATIONS = ("swiglu", "gpt_oss")


def supports(
    x_RD: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    activation: str = "swiglu",
) -> bool:
    """Whether these tensors can take the Triton path: bf16 on Hopper or later, 16-byte rows, SwiGLU or
    gpt-oss's form of it."""
    tensors = (x_RD, gate_up_E2ND, down_EDN)
    if activation not in ACTIVATIONS or not all(t.is_cuda and t.dtype == torch.bfloat16 for t in tensors):
        return False
    if not has_bulk_copies(x_RD.device):
        return False
    num_experts, d, n = down_EDN.shape
    aligned = d % 8 == 0 and n % 8 == 0 and all(t.storage_offset() % 8 == 0 for t in tensors)
    return (
        aligned and num_experts <= _MAX_EXPERTS and gate_up_E2ND.is_contiguous() and down_EDN.is_contiguous()
    )


class InputGrads(NamedTuple):
    x_RD: torch.Tensor | None
    weights_RK: torch.Tensor
    gate_up_bias: torch.Tensor | None = None


def layer_tiles(ids_RK: torch.Tensor, down_EDN: torch.Tensor, spare_sms: int = 0) -> LayerTiles:
    num_experts, d, n = down_EDN.shape
    return tiles_for(ids_RK.shape[0] * ids_RK.shape[1], num_experts, d, n, spare_sms)


def forward(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    first: GateUp,
    down_EDN: torch.Tensor,
    *,
    keep: bool,
    max_rows: int | None = None,
    spare_sms: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, RowMap]:
    """``(y [R, D], pre-activation [2, M, N] if ``keep``, map)``."""
    tiles = layer_tiles(ids_RK, down_EDN, spare_sms)
    row_map = build_row_map(ids_RK, down_EDN.shape[0], align=tiles.align, max_rows=max_rows)
    pre_2MN, act_MN = _first_product(x_RD, weights_RK, first, row_map, tiles, keep=keep)
    y_MD = project(act_MN, down_EDN, row_map, transposed=True, tile=tiles.project)
    return combine_rows(y_MD, row_map), pre_2MN, row_map


def _first_product(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    first: GateUp,
    row_map: RowMap,
    tiles: LayerTiles,
    *,
    keep: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The pre-activation if ``keep``, and the weighted activation."""
    gathered = tiles.gathered and x_RD.shape[0] > 0
    rows = x_RD if gathered else permute_rows(x_RD, row_map)
    return gate_up(rows, weights_RK, first, row_map, gathered=gathered, store_pre=keep, tile=tiles.gate_up)


Into = tuple[WeightGrad | None, WeightGrad | None]
"""Where the gradients of gate_up and down go."""


class Operands(NamedTuple):
    """What weight gradients are computed from."""

    down: list[torch.Tensor]
    """Gradients of outputs, and activations; given up once they have been used."""
    dpre_M2N: torch.Tensor
    x_RD: torch.Tensor
    row_map: RowMap


def write_weight_grads(operands: Operands, into: Into, spare_sms: int = 0) -> None:
    """The gradients of gate_up and down."""

    def write(left: torch.Tensor, right: torch.Tensor, target: WeightGrad) -> None:
        buffer, accumulate = target
        tile = grad_tile(buffer, accumulate, spare_sms)
        weight_grad(left, right, operands.row_map, buffer, accumulate=accumulate, tile=tile)

    if into[1] is not None:
        write(operands.down[0], operands.down[1], into[1])
    operands.down.clear()
    if into[0] is not None:
        write(operands.dpre_M2N, permute_rows(operands.x_RD, operands.row_map), into[0])


def backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    weights: tuple[GateUp, torch.Tensor],
    kept: tuple[torch.Tensor, RowMap],
    write: Callable[[Operands], None],
    *,
    want_x: bool = True,
    spare_sms: int = 0,
) -> InputGrads:
    """Gradients of x, of the router weights and of a bias. ``write`` sees to those of gate_up and down; what
    it does not keep is given up before the last product."""
    (first, down_EDN), (pre_2MN, row_map) = weights, kept
    del kept
    tiles = layer_tiles(row_map.position_RK, down_EDN, spare_sms)
    dweights_RK = torch.empty(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
    dy_MD = permute_rows(dy_RD, row_map, clear_RK=dweights_RK)
    dact_MN = project(dy_MD, down_EDN, row_map, transposed=False, tile=tiles.project)
    dpre_M2N = swiglu_backward_(pre_2MN, dact_MN, weights_RK, row_map, dweights_RK, clamped=first.clamped)
    operands = Operands([dy_MD, dact_MN], dpre_M2N, x_RD, row_map)  # by now the activation itself
    del dy_MD, dact_MN
    write(operands)
    del operands
    dbias_E2N = None if first.bias_E2N is None else bias_grad(dpre_M2N, row_map)
    if not want_x:
        return InputGrads(None, dweights_RK, dbias_E2N)
    dx_MD = project(dpre_M2N, first.weight_E2ND, row_map, transposed=False, tile=tiles.project)
    return InputGrads(combine_rows(dx_MD, row_map), dweights_RK, dbias_E2N)


class _FusedCall(NamedTuple):
    """What the autograd function needs beside tensors."""

    sinks: tuple[GradSink | None, GradSink | None, GradSink | None]
    """Of gate_up, down and gate_up's bias."""
    max_rows: int | None
    recompute: bool
    clamped: bool
    spare_sms: int = 0
    late: LateGrads | None = None


class _ExpertsMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: torch.Tensor,
        weights_RK: torch.Tensor,
        ids_RK: torch.Tensor,
        gate_up_E2ND: torch.Tensor,
        down_EDN: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        call: _FusedCall,
    ) -> torch.Tensor:
        needs_grad = any(ctx.needs_input_grad)
        keep = needs_grad and not call.recompute
        first = GateUp(gate_up_E2ND, gate_up_bias, call.clamped)
        y_RD, pre_2MN, row_map = forward(
            x_RD, weights_RK, ids_RK, first, down_EDN, keep=keep, max_rows=call.max_rows,
            spare_sms=call.spare_sms,
        )  # fmt: skip
        if needs_grad:
            kept = x_RD, weights_RK, gate_up_E2ND, down_EDN, gate_up_bias, pre_2MN
            ctx.save_for_backward(*kept, *row_map)
            ctx.call = call
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_RD, weights_RK, gate_up_E2ND, down_EDN, bias_E2N, pre_2MN, *map_tensors = ctx.saved_tensors
        want_x, want_weights, _, want_gate_up, want_down, want_bias, _ = ctx.needs_input_grad
        row_map, call = RowMap(*map_tensors), ctx.call
        first = GateUp(gate_up_E2ND, bias_E2N, call.clamped)
        if pre_2MN is None:
            tiles = layer_tiles(row_map.position_RK, down_EDN, call.spare_sms)
            pre_2MN, _ = _first_product(x_RD, weights_RK, first, row_map, tiles, keep=True)
        returned: tuple[torch.Tensor | None, ...] = (None, None)

        def write(operands: Operands) -> tuple[torch.Tensor | None, ...]:
            into = (
                grad_target(gate_up_E2ND, call.sinks[0], want_gate_up),
                grad_target(down_EDN, call.sinks[1], want_down),
            )
            write_weight_grads(operands, into, call.late.spare_sms if call.late else call.spare_sms)
            return tuple(
                target.buffer if target is not None and sink is None else None
                for target, sink in zip(into, call.sinks, strict=False)
            )

        def write_or_leave(operands: Operands) -> None:
            nonlocal returned
            if call.late is None:
                returned = write(operands)
            else:
                call.late.leave(functools.partial(write, operands))

        dx_RD, dweights_RK, dbias_E2N = backward(
            dy_RD.contiguous(), x_RD, weights_RK, (first, down_EDN), (pre_2MN, row_map), write_or_leave,
            want_x=want_x, spare_sms=call.spare_sms,
        )  # fmt: skip
        dweights = dweights_RK.to(weights_RK.dtype) if want_weights else None
        dbias = None
        if want_bias and dbias_E2N is not None:
            dbias = deliver(dbias_E2N, call.sinks[2], bias_E2N.dtype)
        return dx_RD, dweights, None, returned[0], returned[1], dbias, None


def experts_mlp_triton(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    *,
    activation: str = "swiglu",
    max_rows: int | None = None,
    recompute: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    spare_sms: int = 0,
    late: LateGrads | None = None,
) -> torch.Tensor:
    """The experts' output for every row; differentiable in x, weights, gate_up, down and gate_up's bias
    ``[E, 2N]``. With ``recompute`` backward computes the pre-activation again. ``spare_sms`` and ``late``:
    see :class:`~fsdmoe.kernels.expert_operands.ExpertPolicy`.

    ``max_rows`` bounds how many ids are not -1, where the caller knows it without asking the device:
    buffers are then that large instead of R·K rows. A bound that proves too small gives NaN, not a partial
    sum.
    """
    num_experts, two_n, d = gate_up_E2ND.shape
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"expected activation {ACTIVATIONS}, got {activation!r}; use the plain torch experts"
        )
    if (
        down_EDN.shape != (num_experts, d, two_n // 2)
        or x_RD.shape[-1] != d
        or weights_RK.shape != ids_RK.shape
    ):
        raise ValueError(
            f"expected x [R, {d}], weights and ids [R, K], down [{num_experts}, {d}, {two_n // 2}], got "
            f"{tuple(x_RD.shape)}, {tuple(weights_RK.shape)}, {tuple(ids_RK.shape)}, {tuple(down_EDN.shape)}"
        )
    x_RD, weights_RK, ids_RK = x_RD.contiguous(), weights_RK.contiguous(), ids_RK.contiguous()
    gate_up_bias = None if gate_up_bias is None else gate_up_bias.contiguous()
    clamped = activation == "gpt_oss"
    if not torch.is_grad_enabled():  # which the function itself is not told
        first = GateUp(gate_up_E2ND, gate_up_bias, clamped)
        given = x_RD, weights_RK, ids_RK, first, down_EDN
        return forward(*given, keep=False, max_rows=max_rows, spare_sms=spare_sms)[0]
    bias_sink = None if gate_up_bias is None else sink_of(gate_up_bias)
    sinks = (sink_of(gate_up_E2ND), sink_of(down_EDN), bias_sink)
    call = _FusedCall(sinks, max_rows, recompute, clamped, spare_sms, late)
    return _ExpertsMLP.apply(x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, gate_up_bias, call)
