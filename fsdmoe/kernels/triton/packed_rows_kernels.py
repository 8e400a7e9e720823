"""Rows to eight bits and back, in one pass each: see ``fsdmoe/kernels/packed_rows.py``.

An exponent as it is stored (E8M0) is the exponent field of the scale as a float: no logarithm is taken. A
block whose scale would be below 2^-126 gets that, and comes out as zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_scale import to_codes
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_BLOCKS = tl.constexpr(8)  # of 128 elements that a program takes


def supports_packing(device: torch.device) -> bool:
    """Conversions to fp8 are instructions from Ada on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@QuickLaunch
@triton.jit
def _pack_rows_kernel(x_ptr, out_ptr, width, out_width):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * _BLOCKS + tl.arange(0, _BLOCKS)
    columns = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), 1), 448.0)
    exponent = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = to_codes(x * inverse[:, None])
    is_finite = tl.sum((x - x != 0.0).to(tl.int32), 1) == 0
    out = out_ptr + row * out_width
    tl.store(out + columns, codes, mask=columns < width)
    stored = tl.where(is_finite, exponent, 255).to(tl.uint8)
    tl.store(out + width + blocks, stored, mask=blocks * 128 < width)


@QuickLaunch
@triton.jit
def _unpack_rows_kernel(packed_ptr, out_ptr, width, packed_width):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * _BLOCKS + tl.arange(0, _BLOCKS)
    columns = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    packed = packed_ptr + row * packed_width
    codes = tl.load(packed + columns, mask=columns < width, other=0).to(tl.float8e4nv, bitcast=True)
    exponent = tl.load(packed + width + blocks, mask=blocks * 128 < width, other=0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 255, float("nan"), scale)
    values = codes.to(tl.float32) * scale[:, None]
    tl.store(out_ptr + row * width + columns, values.to(out_ptr.dtype.element_ty), mask=columns < width)


def pack_rows_triton(x_RD: torch.Tensor) -> torch.Tensor:
    num_rows, width = x_RD.shape
    num_blocks = cdiv(width, 128)
    out = torch.empty(num_rows, width + num_blocks, device=x_RD.device, dtype=torch.uint8)
    grid = (num_rows, cdiv(num_blocks, _BLOCKS.value))
    _pack_rows_kernel[grid](x_RD.contiguous(), out, width, out.shape[1], num_warps=4)
    return out


def unpack_rows_triton(packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    num_rows, packed_width = packed.shape
    out = torch.empty(num_rows, width, device=packed.device, dtype=dtype)
    grid = (num_rows, cdiv(cdiv(width, 128), _BLOCKS.value))
    _unpack_rows_kernel[grid](packed.contiguous(), out, width, packed_width, num_warps=4)
    return out
