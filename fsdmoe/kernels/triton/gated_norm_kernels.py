"""Root-mean-square norm with a gate, forward and backward, each in one pass over the rows.

    y = x̂ · w · a(g), x̂ = x · r, r = 1 / sqrt(mean(x²) + ε), a(g) = g · σ(g) or σ(g)
    d x = r · (v − x̂ · mean(v · x̂)), v = w · a(g) · dy
    d g = dy · x̂ · w · a'(g),   d w = Σ over rows of dy · a(g) · x̂

As in :mod:`fsdmoe.kernels.triton.rms_norm_kernels`: fp32 inside, nothing kept but the inputs, results that do
not change from run to run. Legend: R rows, D columns, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.grad_sink import deliver, sink_of
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.kernels.triton.rms_norm_kernels import blocking_of, load_rows, num_backward_programs, rows_of


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    stride_x,
    stride_gate,
    eps,
    SILU: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x = load_rows(x_ptr, rows, stride_x, num_rows, D, COLUMNS)
    gate = load_rows(gate_ptr, rows, stride_gate, num_rows, D, COLUMNS)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    opened = tl.sigmoid(gate)
    if SILU:
        opened *= gate
    out = x * scale[:, None] * weight[None, :] * opened
    inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    at = rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _gated_norm_backward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    dout_ptr,
    dx_ptr,
    dgate_ptr,
    shares_ptr,
    num_rows,
    num_programs,
    stride_x,
    stride_gate,
    stride_dout,
    eps,
    SILU: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    share = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, num_programs * ROWS):
        rows = first + tl.arange(0, ROWS)
        x = load_rows(x_ptr, rows, stride_x, num_rows, D, COLUMNS)
        gate = load_rows(gate_ptr, rows, stride_gate, num_rows, D, COLUMNS)
        dout = load_rows(dout_ptr, rows, stride_dout, num_rows, D, COLUMNS)
        scale = (1 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        normed = x * scale
        opened = tl.sigmoid(gate)
        slope = opened * (1 - opened)
        if SILU:
            slope = opened + gate * slope
            opened *= gate
        inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]
        dgate = dout * normed * weight * slope
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        dout *= opened
        share += dout * normed
        dout *= weight
        mean = (tl.sum(dout * normed, 1) / D)[:, None]
        dx = scale * (dout - normed * mean)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(shares_ptr + tl.program_id(0) * D + columns, tl.sum(share, 0), mask=columns < D)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float, silu: bool
    ) -> torch.Tensor:
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        x_RD, gate_RD, blocking = rows_of(x), rows_of(gate), blocking_of(x.shape[-1])
        num_rows = x_RD.shape[0]
        if out.numel() > 0:
            _gated_norm_kernel[(cdiv(num_rows, blocking["ROWS"]),)](
                x_RD, gate_RD, weight_D, out, num_rows, x_RD.stride(0), gate_RD.stride(0), eps,
                SILU=silu, **blocking,
            )  # fmt: skip
        ctx.save_for_backward(x, gate, weight_D)
        ctx.eps, ctx.silu, ctx.sink = eps, silu, sink_of(weight_D)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
        x, gate, weight_D = ctx.saved_tensors
        x_RD, gate_RD, dout_RD = rows_of(x), rows_of(gate), rows_of(dout)
        num_rows, d = x_RD.shape
        dx, dgate = (torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (x, gate))
        blocking = blocking_of(d)
        programs = num_backward_programs(num_rows, blocking["ROWS"], x.device)
        shares_PD = torch.empty(programs, d, device=x.device, dtype=torch.float32)
        _gated_norm_backward_kernel[(programs,)](
            x_RD, gate_RD, weight_D, dout_RD, dx, dgate, shares_PD, num_rows, programs,
            x_RD.stride(0), gate_RD.stride(0), dout_RD.stride(0), ctx.eps, SILU=ctx.silu, **blocking,
        )  # fmt: skip
        dweight_D = None
        if ctx.needs_input_grad[2]:
            dweight_D = deliver(shares_PD.sum(0), ctx.sink, weight_D.dtype)
        return dx, dgate, dweight_D, None, None


def gated_norm_triton(
    x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float, *, silu: bool
) -> torch.Tensor:
    """``x`` normed over its last dimension times the opened gate, contiguous; differentiable in all three."""
    return _GatedNorm.apply(x, gate, weight_D.contiguous(), eps, silu)
