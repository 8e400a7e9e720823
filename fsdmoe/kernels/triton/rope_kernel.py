"""Rotary positions in one pass, forward and backward: the rotation, and its inverse.

Pairs are ``(i, i + P)`` of the last dimension, the half-split convention; ``interleaved`` reads neighbours
``(2i, 2i + 1)``, DeepSeek's convention, and still writes the result half-split (queries and keys get the same
order, so their products are the same). Angles are used in fp32. Tables have an entry a pair, P wide, or one
for each of its two members, 2P wide, as transformers' models make them. Legend: B rows, S positions, H heads,
D = 2P.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2


@QuickLaunch
@triton.jit
def _rope_kernel(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    length,
    num_heads,
    stride_row,
    stride_token,
    stride_head,
    stride_table_row,
    stride_table_token,
    pairs,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BOTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    inside = (heads < num_heads)[:, None] & (pair < pairs)[None, :]
    at = token // length * stride_table_row + token % length * stride_table_token + pair
    cos_first = tl.load(cos_ptr + at, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_ptr + at, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    cos_second = cos_first
    sin_second = sin_first
    if BOTH:
        cos_second = tl.load(cos_ptr + at + pairs, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
        sin_second = tl.load(sin_ptr + at + pairs, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    strided = (
        x_ptr + token // length * stride_row + token % length * stride_token + heads[:, None] * stride_head
    )
    packed = out_ptr + token * num_heads * 2 * pairs + heads[:, None] * 2 * pairs
    if INVERSE:
        # The gradient arrives half-split and leaves in the order of the input.
        first = tl.load(strided + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(strided + pairs + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        sin_first, sin_second = -sin_second, -sin_first  # the transpose: each sine crosses over
    elif INTERLEAVED:
        first = tl.load(strided + 2 * pair[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(strided + 2 * pair[None, :] + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        first = tl.load(strided + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(strided + pairs + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated_first = (first * cos_first - second * sin_first).to(out_ptr.dtype.element_ty)
    rotated_second = (second * cos_second + first * sin_second).to(out_ptr.dtype.element_ty)
    if INVERSE and INTERLEAVED:
        tl.store(packed + 2 * pair[None, :], rotated_first, mask=inside)
        tl.store(packed + 2 * pair[None, :] + 1, rotated_second, mask=inside)
    else:
        tl.store(packed + pair[None, :], rotated_first, mask=inside)
        tl.store(packed + pairs + pair[None, :], rotated_second, mask=inside)


def _rotate(
    x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool
) -> torch.Tensor:
    """``cos`` and ``sin`` have equal strides, and dense entries."""
    if x_BSHD.stride(3) != 1:
        x_BSHD = x_BSHD.contiguous()
    out_BSHD = torch.empty(x_BSHD.shape, device=x_BSHD.device, dtype=x_BSHD.dtype)
    batch, length, num_heads, d = x_BSHD.shape
    heads = min(16, next_power_of_2(num_heads))
    if out_BSHD.numel() > 0:
        _rope_kernel[(batch * length, cdiv(num_heads, heads))](
            x_BSHD,
            out_BSHD,
            cos,
            sin,
            length,
            num_heads,
            *x_BSHD.stride()[:3],
            *cos.stride()[:2],
            d // 2,
            HEADS=heads,
            PAIRS=next_power_of_2(d // 2),
            BOTH=cos.shape[-1] == d,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            num_warps=4,
        )
    return out_BSHD


def tables_for(
    x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel takes them: one set of positions for all rows is repeated by a stride of zero."""
    if cos.shape[0] == 1 < x_BSHD.shape[0]:
        cos, sin = (table.expand(x_BSHD.shape[0], -1, -1) for table in (cos, sin))
    rows, d = tuple(x_BSHD.shape[:2]), x_BSHD.shape[3]
    if tuple(cos.shape) not in ((*rows, d // 2), (*rows, d)) or cos.shape != sin.shape:
        raise ValueError(
            f"expected cos and sin {(*rows, d // 2)} or {(*rows, d)}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x_BSHD, cos, sin, interleaved, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSHD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dout_BSHD, cos, sin, ctx.interleaved, inverse=True), None, None, None


def rope_triton(
    x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """``x`` rotated by its positions' angles, contiguous; differentiable in x, which may be a strided view.
    Tables are ``[B or 1, S, P or 2P]``."""
    return _Rope.apply(x_BSHD, *tables_for(x_BSHD, cos, sin), interleaved)
