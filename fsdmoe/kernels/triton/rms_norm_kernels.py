"""Root-mean-square norm, perhaps with a gate, forward and backward, each in one pass over the rows.

    y = x̂ · w · a(g), x̂ = x · r, r = 1 / sqrt(mean(x²) + ε)
    d x = r · (v − x̂ · mean(v · x̂)), v = w · a(g) · dy
    d g = dy · x̂ · w · a'(g),   d w = Σ over rows of dy · a(g) · x̂

w is the weight, or an offset and the weight: added in fp32, where 1 + w loses none of w's bits. a(g) is one
without a gate, else g · σ(g) or σ(g).

Arithmetic is fp32. A row stays in registers, so backward recomputes r from x, and nothing but x and the
gate is kept. Each of a few programs walks rows and sums its share of d w in registers; the shares are then
added up in a fixed order: results do not change from run to run. Legend: R rows, D columns, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.grad_sink import deliver, sink_of
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2, num_programs

# Elements that one program holds at a time: short rows are taken several at once.
_TILE_ELEMENTS = 2048
_PROGRAMS_PER_MULTIPROCESSOR = 4
_UNGATED, _SIGMOID, _SILU = 0, 1, 2


@triton.jit
def _load_rows(x_ptr, rows, stride, num_rows, D: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    stride_x,
    stride_gate,
    eps,
    OFFSET: tl.constexpr,
    GATE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x = _load_rows(x_ptr, rows, stride_x, num_rows, D, COLUMNS)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    out = x * scale[:, None] * weight[None, :]
    if GATE > 0:
        gate = _load_rows(gate_ptr, rows, stride_gate, num_rows, D, COLUMNS)
        opened = tl.sigmoid(gate)
        if GATE == 2:
            opened *= gate
        out *= opened
    inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    at = rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _rms_norm_backward_kernel(
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
    OFFSET: tl.constexpr,
    GATE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    weight = (tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET)[None, :]
    share = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, num_programs * ROWS):
        rows = first + tl.arange(0, ROWS)
        x = _load_rows(x_ptr, rows, stride_x, num_rows, D, COLUMNS)
        dout = _load_rows(dout_ptr, rows, stride_dout, num_rows, D, COLUMNS)
        scale = (1 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        normed = x * scale
        inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]
        if GATE > 0:
            gate = _load_rows(gate_ptr, rows, stride_gate, num_rows, D, COLUMNS)
            opened = tl.sigmoid(gate)
            slope = opened * (1 - opened)
            if GATE == 2:
                slope = opened + gate * slope
                opened *= gate
            dgate = dout * normed * weight * slope
            tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dout *= opened
        share += dout * normed
        dout *= weight
        mean = (tl.sum(dout * normed, 1) / D)[:, None]
        dx = scale * (dout - normed * mean)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(shares_ptr + tl.program_id(0) * D + columns, tl.sum(share, 0), mask=columns < D)


def _blocking_of(d: int) -> dict[str, int]:
    columns = next_power_of_2(d)
    rows = max(1, _TILE_ELEMENTS // columns)
    return {"D": d, "ROWS": rows, "COLUMNS": columns, "num_warps": 4 if columns <= 4096 else 8}


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[R, D]`` with dense rows: a view wherever strides allow it, as for part of a wider projection."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def num_backward_programs(num_rows: int, rows_at_once: int, device: torch.device) -> int:
    """Programs that walk the rows, each with its share of the weight's gradient."""
    return max(1, min(_PROGRAMS_PER_MULTIPROCESSOR * num_programs(device), cdiv(num_rows, rows_at_once)))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor | None,
        weight_D: torch.Tensor,
        eps: float,
        offset: float,
        kind: int,
    ) -> torch.Tensor:
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        x_RD, blocking = _rows_of(x), _blocking_of(x.shape[-1])
        gate_RD = x_RD if gate is None else _rows_of(gate)
        num_rows = len(x_RD)
        if out.numel() > 0:
            _rms_norm_kernel[(cdiv(num_rows, blocking["ROWS"]),)](
                x_RD, gate_RD, weight_D, out, num_rows, x_RD.stride(0), gate_RD.stride(0), eps,
                OFFSET=offset, GATE=kind, **blocking,
            )  # fmt: skip
        ctx.save_for_backward(x, gate, weight_D)
        ctx.constants = {"OFFSET": offset, "GATE": kind, **blocking}
        ctx.eps, ctx.sink = eps, sink_of(weight_D)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight_D = ctx.saved_tensors
        x_RD, dout_RD = _rows_of(x), _rows_of(dout)
        gate_RD = x_RD if gate is None else _rows_of(gate)
        num_rows, d = x_RD.shape
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        dgate = None if gate is None else torch.empty(x.shape, device=x.device, dtype=x.dtype)
        programs = num_backward_programs(num_rows, ctx.constants["ROWS"], x.device)
        shares_PD = torch.empty(programs, d, device=x.device, dtype=torch.float32)
        _rms_norm_backward_kernel[(programs,)](
            x_RD, gate_RD, weight_D, dout_RD, dx, dx if dgate is None else dgate, shares_PD, num_rows,
            programs, x_RD.stride(0), gate_RD.stride(0), dout_RD.stride(0), ctx.eps, **ctx.constants,
        )  # fmt: skip
        dweight_D = None
        if ctx.needs_input_grad[2]:
            dweight_D = deliver(shares_PD.sum(0), ctx.sink, weight_D.dtype)
        return dx, dgate, dweight_D, None, None, None


def rms_norm_triton(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x`` normed over its last dimension, contiguous; differentiable in x and weight."""
    return _RMSNorm.apply(x, None, weight_D.contiguous(), eps, offset, _UNGATED)


def gated_norm_triton(
    x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float, *, silu: bool
) -> torch.Tensor:
    """The same times the opened gate, of the shape and the dtype of ``x``; differentiable in it too."""
    return _RMSNorm.apply(x, gate, weight_D.contiguous(), eps, 0.0, _SILU if silu else _SIGMOID)
