"""Rotary positions in one pass, forward and backward: the rotation, and its inverse.

Pairs are ``(i, i + P)`` of the last dimension, the half-split convention; ``interleaved`` reads neighbours
``(2i, 2i + 1)``, DeepSeek's convention, and still writes the result half-split (queries and keys get the same
order, so their products are the same). Angles are used in fp32. Legend: B rows, S positions, H heads, D = 2P.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

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
    pairs,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    inside = (heads < num_heads)[:, None] & (pair < pairs)[None, :]
    cos = tl.load(cos_ptr + token * pairs + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * pairs + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    strided = (
        x_ptr + token // length * stride_row + token % length * stride_token + heads[:, None] * stride_head
    )
    packed = out_ptr + token * num_heads * 2 * pairs + heads[:, None] * 2 * pairs
    if INVERSE:
        # The gradient arrives half-split and leaves in the order of the input.
        first = tl.load(strided + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(strided + pairs + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        sin = -sin
    elif INTERLEAVED:
        first = tl.load(strided + 2 * pair[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(strided + 2 * pair[None, :] + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        first = tl.load(strided + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(strided + pairs + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    turned_first = (first * cos - second * sin).to(out_ptr.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(out_ptr.dtype.element_ty)
    if INVERSE and INTERLEAVED:
        tl.store(packed + 2 * pair[None, :], turned_first, mask=inside)
        tl.store(packed + 2 * pair[None, :] + 1, turned_second, mask=inside)
    else:
        tl.store(packed + pair[None, :], turned_first, mask=inside)
        tl.store(packed + pairs + pair[None, :], turned_second, mask=inside)


def _turn(
    x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor, interleaved: bool, inverse: bool
) -> torch.Tensor:
    if x_BSHD.stride(3) != 1:
        x_BSHD = x_BSHD.contiguous()
    out_BSHD = torch.empty(x_BSHD.shape, device=x_BSHD.device, dtype=x_BSHD.dtype)
    _turn_into(out_BSHD, x_BSHD, cos_BSP, sin_BSP, interleaved, inverse)
    return out_BSHD


def _turn_into(
    out_BSHD: torch.Tensor,
    x_BSHD: torch.Tensor,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    interleaved: bool,
    inverse: bool,
) -> None:
    batch, length, num_heads, d = x_BSHD.shape
    heads = min(16, next_power_of_2(num_heads))
    if out_BSHD.numel() > 0:
        _rope_kernel[(batch * length, cdiv(num_heads, heads))](
            x_BSHD,
            out_BSHD,
            cos_BSP,
            sin_BSP,
            length,
            num_heads,
            *x_BSHD.stride()[:3],
            d // 2,
            HEADS=heads,
            PAIRS=next_power_of_2(d // 2),
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            num_warps=4,
        )


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_BSP, sin_BSP)
        ctx.interleaved = interleaved
        return _turn(x_BSHD, cos_BSP, sin_BSP, interleaved, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSHD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos_BSP, sin_BSP = ctx.saved_tensors
        return _turn(dout_BSHD, cos_BSP, sin_BSP, ctx.interleaved, inverse=True), None, None, None


def rope_triton(
    x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """``x`` turned by its positions' angles, contiguous; differentiable in x, which may be a strided view."""
    if cos_BSP.shape[0] == 1 < x_BSHD.shape[0]:  # the same positions in every row
        cos_BSP, sin_BSP = (table.expand(x_BSHD.shape[0], -1, -1) for table in (cos_BSP, sin_BSP))
    if cos_BSP.shape != (*x_BSHD.shape[:2], x_BSHD.shape[3] // 2) or cos_BSP.shape != sin_BSP.shape:
        raise ValueError(
            f"expected cos and sin {(*x_BSHD.shape[:2], x_BSHD.shape[3] // 2)}, "
            f"got {tuple(cos_BSP.shape)} and {tuple(sin_BSP.shape)}"
        )
    return _Rope.apply(x_BSHD, cos_BSP.contiguous(), sin_BSP.contiguous(), interleaved)


def rope_reference(
    x_BSHD: torch.Tensor, cos_BSP: torch.Tensor, sin_BSP: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """The same in plain torch, in the wider of fp32 and the type of x."""
    wide = x_BSHD.to(torch.promote_types(x_BSHD.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos_BSP.unsqueeze(2), sin_BSP.unsqueeze(2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BSHD.dtype)
