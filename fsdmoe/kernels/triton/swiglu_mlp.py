"""``experts_mlp_triton``: the expert layer's local compute on Hopper in bf16, as one differentiable function.

    y_r = Σ_k down[e] (p · silu(gate[e] x_r) · up[e] x_r),   e = ids[r, k], p = weights[r, k], summed in fp32

An id of -1 contributes nothing. Only x, the pre-activation and the row map are kept for backward. Weight
gradients go straight to a parameter's gradient sink where it has one. Nothing here waits for the device, so
a CUDA graph can capture it. Under ``torch.compile`` the same kernels run as custom operators (see ``ops``),
which know no sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fsdmoe.kernels.grad_sink import GradSink, sink_of
from fsdmoe.kernels.triton import layer
from fsdmoe.kernels.triton.launch import has_bulk_copies
from fsdmoe.kernels.triton.layer import WeightGrad
from fsdmoe.kernels.triton.ops import experts_mlp_op
from fsdmoe.kernels.triton.row_map import RowMap

_MAX_EXPERTS = 1024


def supports(
    x_RD: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    activation: str = "swiglu",
) -> bool:
    """Whether these tensors can take the Triton path: bf16 on Hopper or later, 16-byte rows, SwiGLU."""
    tensors = (x_RD, gate_up_E2ND, down_EDN)
    if activation != "swiglu" or not all(t.is_cuda and t.dtype == torch.bfloat16 for t in tensors):
        return False
    if not has_bulk_copies(x_RD.device):
        return False
    num_experts, d, n = down_EDN.shape
    aligned = d % 8 == 0 and n % 8 == 0 and all(t.storage_offset() % 8 == 0 for t in tensors)
    return (
        aligned and num_experts <= _MAX_EXPERTS and gate_up_E2ND.is_contiguous() and down_EDN.is_contiguous()
    )


def _grad_target(weight: torch.Tensor, sink: GradSink | None, wanted: bool) -> WeightGrad | None:
    if not wanted:
        return None
    if sink is None:
        return WeightGrad(torch.empty_like(weight), False)
    buffer, accumulate = sink.claim()
    if buffer.shape != weight.shape or not buffer.is_contiguous():
        raise AssertionError(
            f"expected a contiguous gradient buffer of shape {tuple(weight.shape)}, "
            f"got shape {tuple(buffer.shape)}, strides {buffer.stride()}"
        )
    return WeightGrad(buffer, accumulate)


class _ExpertsMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: torch.Tensor,
        weights_RK: torch.Tensor,
        ids_RK: torch.Tensor,
        gate_up_E2ND: torch.Tensor,
        down_EDN: torch.Tensor,
        sinks: tuple[GradSink | None, GradSink | None],
        max_rows: int | None,
    ) -> torch.Tensor:
        keep = any(ctx.needs_input_grad)
        y_RD, pre_2MN, row_map = layer.forward(
            x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, keep=keep, max_rows=max_rows
        )
        if keep:
            ctx.save_for_backward(x_RD, weights_RK, gate_up_E2ND, down_EDN, pre_2MN, *row_map)
            ctx.sinks = sinks
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_RD, weights_RK, gate_up_E2ND, down_EDN, pre_2MN, *map_tensors = ctx.saved_tensors
        want_x, want_weights, _, want_gate_up, want_down, _, _ = ctx.needs_input_grad
        into = (
            _grad_target(gate_up_E2ND, ctx.sinks[0], want_gate_up),
            _grad_target(down_EDN, ctx.sinks[1], want_down),
        )
        dx_RD, dweights_RK = layer.backward(
            dy_RD.contiguous(),
            x_RD,
            weights_RK,
            (gate_up_E2ND, down_EDN),
            pre_2MN,
            RowMap(*map_tensors),
            into,
            want_x=want_x,
        )
        returned = [
            target.buffer if target is not None and sink is None else None
            for target, sink in zip(into, ctx.sinks, strict=True)
        ]
        dweights = dweights_RK.to(weights_RK.dtype) if want_weights else None
        return dx_RD, dweights, None, returned[0], returned[1], None, None


def experts_mlp_triton(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    *,
    activation: str = "swiglu",
    max_rows: int | None = None,
) -> torch.Tensor:
    """The experts' output for every row; differentiable in x, weights, gate_up and down.

    ``max_rows`` bounds how many ids are not -1, where the caller knows it without asking the device:
    buffers are then that large instead of R·K rows. A bound that proves too small gives NaN, not a partial
    sum.
    """
    num_experts, two_n, d = gate_up_E2ND.shape
    if activation != "swiglu":
        raise ValueError(f"expected activation 'swiglu', got {activation!r}; use the plain torch experts")
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
    if torch.compiler.is_compiling():
        return experts_mlp_op(x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN, max_rows)
    given = x_RD, weights_RK, ids_RK, gate_up_E2ND, down_EDN
    if not torch.is_grad_enabled():  # which the function itself is not told
        return layer.forward(*given, keep=False, max_rows=max_rows)[0]
    sinks = (sink_of(gate_up_E2ND), sink_of(down_EDN))
    return _ExpertsMLP.apply(*given, sinks, max_rows)
