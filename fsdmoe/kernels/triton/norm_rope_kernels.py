"""The norm of each head and the rotation by its position in one pass, forward and backward.

Equal to :mod:`fsdmoe.kernels.triton.rms_norm_kernels` followed by :mod:`fsdmoe.kernels.triton.rope_kernel`,
what lies between them rounded as it would be in memory; only sums are taken in another order, one that is the
same in every run. What is kept for backward is x, and heads may lie apart.

Legend: B rows, S positions, H heads, D = 2P; a *head* below is one of the B S H vectors of D elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.grad_sink import deliver, sink_of
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2
from fsdmoe.kernels.triton.rms_norm_kernels import num_backward_programs
from fsdmoe.kernels.triton.rope_kernel import tables_for

# Elements that one program holds at a time.
_TILE_ELEMENTS = 2048


@triton.jit
def _load_halves(ptr, places, stride_row, stride_token, stride_head, PAIRS: tl.constexpr):
    heads, num_heads, length, all_heads = places
    token = (heads // num_heads).to(tl.int64)
    base = token // length * stride_row + token % length * stride_token
    at = (base + (heads % num_heads) * stride_head)[:, None] + tl.arange(0, PAIRS)[None, :]
    inside = (heads < all_heads)[:, None]
    first = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + at + PAIRS, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_angles(ptr, places, stride_row, stride_token, PAIRS: tl.constexpr, BOTH: tl.constexpr):
    heads, num_heads, length, all_heads = places
    token = (heads // num_heads).to(tl.int64)
    base = token // length * stride_row + token % length * stride_token
    at, inside = base[:, None] + tl.arange(0, PAIRS)[None, :], (heads < all_heads)[:, None]
    first = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = first
    if BOTH:
        second = tl.load(ptr + at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_halves(ptr, first, second, heads, all_heads, PAIRS: tl.constexpr):
    at = heads.to(tl.int64)[:, None] * (2 * PAIRS) + tl.arange(0, PAIRS)[None, :]
    inside = (heads < all_heads)[:, None]
    tl.store(ptr + at, first.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + at + PAIRS, second.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _as_stored(x, ptr):
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@QuickLaunch
@triton.jit(do_not_specialize=["all_heads"])
def _norm_rope_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    all_heads,
    num_heads,
    length,
    stride_row,
    stride_token,
    stride_head,
    stride_table_row,
    stride_table_token,
    eps,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BOTH: tl.constexpr,
):
    heads, pair = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, PAIRS)
    places = (heads, num_heads, length, all_heads)
    first, second = _load_halves(x_ptr, places, stride_row, stride_token, stride_head, PAIRS)
    cos_first, cos_second = _load_angles(cos_ptr, places, stride_table_row, stride_table_token, PAIRS, BOTH)
    sin_first, sin_second = _load_angles(sin_ptr, places, stride_table_row, stride_table_token, PAIRS, BOTH)
    scale = (1 / tl.sqrt(tl.sum(first * first + second * second, 1) / (2 * PAIRS) + eps))[:, None]
    first = _as_stored(first * scale * tl.load(weight_ptr + pair).to(tl.float32)[None, :], out_ptr)
    second = _as_stored(second * scale * tl.load(weight_ptr + PAIRS + pair).to(tl.float32)[None, :], out_ptr)
    rotated_first = first * cos_first - second * sin_first
    rotated_second = second * cos_second + first * sin_second
    _store_halves(out_ptr, rotated_first, rotated_second, heads, all_heads, PAIRS)


@QuickLaunch
@triton.jit(do_not_specialize=["all_heads", "num_programs"])
def _norm_rope_backward_kernel(
    x_ptr,
    weight_ptr,
    dout_ptr,
    dx_ptr,
    shares_ptr,
    cos_ptr,
    sin_ptr,
    all_heads,
    num_programs,
    num_heads,
    length,
    stride_row,
    stride_token,
    stride_head,
    stride_dout_row,
    stride_dout_token,
    stride_dout_head,
    stride_table_row,
    stride_table_token,
    eps,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BOTH: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    weight_first = tl.load(weight_ptr + pair).to(tl.float32)[None, :]
    weight_second = tl.load(weight_ptr + PAIRS + pair).to(tl.float32)[None, :]
    share_first = tl.zeros([HEADS, PAIRS], tl.float32)
    share_second = tl.zeros([HEADS, PAIRS], tl.float32)
    for start in range(tl.program_id(0) * HEADS, all_heads, num_programs * HEADS):
        heads = start + tl.arange(0, HEADS)
        places = (heads, num_heads, length, all_heads)
        first, second = _load_halves(x_ptr, places, stride_row, stride_token, stride_head, PAIRS)
        dout_first, dout_second = _load_halves(
            dout_ptr, places, stride_dout_row, stride_dout_token, stride_dout_head, PAIRS
        )
        cos_first, cos_second = _load_angles(
            cos_ptr, places, stride_table_row, stride_table_token, PAIRS, BOTH
        )
        sin_first, sin_second = _load_angles(
            sin_ptr, places, stride_table_row, stride_table_token, PAIRS, BOTH
        )
        # Rotated back: each sine crosses over.
        dnormed_first = _as_stored(dout_first * cos_first + dout_second * sin_second, dx_ptr)
        dnormed_second = _as_stored(dout_second * cos_second - dout_first * sin_first, dx_ptr)
        scale = (1 / tl.sqrt(tl.sum(first * first + second * second, 1) / (2 * PAIRS) + eps))[:, None]
        first *= scale
        second *= scale
        share_first += dnormed_first * first
        share_second += dnormed_second * second
        dnormed_first *= weight_first
        dnormed_second *= weight_second
        mean = (tl.sum(dnormed_first * first + dnormed_second * second, 1) / (2 * PAIRS))[:, None]
        dx_first, dx_second = scale * (dnormed_first - first * mean), scale * (dnormed_second - second * mean)
        _store_halves(dx_ptr, dx_first, dx_second, heads, all_heads, PAIRS)
    shares_ptr += tl.program_id(0) * (2 * PAIRS)
    tl.store(shares_ptr + pair, tl.sum(share_first, 0))
    tl.store(shares_ptr + PAIRS + pair, tl.sum(share_second, 0))


def _dense(x_BSHD: torch.Tensor) -> torch.Tensor:
    return x_BSHD if x_BSHD.stride(3) == 1 else x_BSHD.contiguous()


def _blocking(x_BSHD: torch.Tensor, cos: torch.Tensor) -> dict[str, int]:
    d = x_BSHD.shape[3]
    return {"HEADS": max(1, _TILE_ELEMENTS // d), "PAIRS": d // 2, "BOTH": cos.shape[-1] == d, "num_warps": 4}


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_D, cos, sin)
        ctx.eps, ctx.sink = eps, sink_of(weight_D)
        x_BSHD, out = _dense(x), torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _, length, num_heads, d = x.shape
        blocking, all_heads = _blocking(x, cos), x.numel() // d
        if all_heads:
            _norm_rope_kernel[(cdiv(all_heads, blocking["HEADS"]),)](
                x_BSHD, weight_D, out, cos, sin, all_heads, num_heads, length, *x_BSHD.stride()[:3],
                *cos.stride()[:2], eps, **blocking,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_D, cos, sin = ctx.saved_tensors
        x_BSHD, dout = _dense(x), _dense(dout)
        _, length, num_heads, d = x.shape
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        blocking, all_heads = _blocking(x, cos), x.numel() // d
        programs = num_backward_programs(all_heads, blocking["HEADS"], x.device)
        shares_PD = torch.empty(programs, d, device=x.device, dtype=torch.float32)
        _norm_rope_backward_kernel[(programs,)](
            x_BSHD, weight_D, dout, dx, shares_PD, cos, sin, all_heads, programs, num_heads, length,
            *x_BSHD.stride()[:3], *dout.stride()[:3], *cos.stride()[:2], ctx.eps, **blocking,
        )  # fmt: skip
        dweight_D = None
        if ctx.needs_input_grad[1]:
            dweight_D = deliver(shares_PD.sum(0), ctx.sink, weight_D.dtype)
        return dx, dweight_D, None, None, None


def supports_norm_rope(x_BSHD: torch.Tensor, weight_D: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether the kernels take these heads: all of a head is rotated, and its half is a power of two."""
    d = x_BSHD.shape[-1]
    is_whole = cos.shape[-1] in (d // 2, d) and weight_D.shape == (d,)
    return (
        is_whole and weight_D.dtype == x_BSHD.dtype and d == next_power_of_2(d) and 2 <= d <= _TILE_ELEMENTS
    )


def norm_rope_triton(
    x_BSHD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Each head of ``x`` normed and rotated by its position's angles, contiguous; differentiable in x, which
    may be a strided view, and in the weight. Tables are ``[B or 1, S, P or 2P]``, pairs ``(i, i + P)``."""
    return _NormRope.apply(x_BSHD, weight_D.contiguous(), eps, *tables_for(x_BSHD, cos, sin))
