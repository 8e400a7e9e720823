"""Values of codes in four bits, in one pass: see ``fsdmoe/precision/four_bit.py``, which is the reference.

The table of 16 numbers is read from memory: it stays in the first cache, and 15 comparisons for each element
would take longer than the values take to be written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.precision.quantized_weight import WeightScales

_BYTES = tl.constexpr(2048)  # of codes that a program takes


@QuickLaunch
@triton.jit
def _decode_kernel(
    codes_ptr, factors_ptr, table_ptr, out_ptr, num_bytes,
    HALF_BLOCK: tl.constexpr, FIRST_IS_HIGH: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * _BYTES + tl.arange(0, _BYTES)
    is_there = at < num_bytes
    codes = tl.load(codes_ptr + at, mask=is_there, other=0).to(tl.int32)
    high = tl.load(table_ptr + (codes >> 4))
    low = tl.load(table_ptr + (codes & 15))
    block = at // HALF_BLOCK
    if HAS_ZERO:
        scale = tl.load(factors_ptr + 2 * block, mask=is_there, other=0.0).to(tl.float32)
        zero = tl.load(factors_ptr + 2 * block + 1, mask=is_there, other=0.0).to(tl.float32)
        high = high * scale + zero
        low = low * scale + zero
    else:
        scale = tl.load(factors_ptr + block, mask=is_there, other=0.0).to(tl.float32)
        high = high * scale
        low = low * scale
    both = tl.join(high, low) if FIRST_IS_HIGH else tl.join(low, high)
    out = out_ptr + 2 * at[:, None] + tl.arange(0, 2)[None, :]
    tl.store(out, both.to(out_ptr.dtype.element_ty), mask=is_there[:, None])


def decode_four_bit(codes: torch.Tensor, scales: WeightScales, dtype: torch.dtype) -> torch.Tensor:
    """The values of contiguous codes."""
    form = scales.four_bit
    assert form is not None
    out = torch.empty(scales.shape_of(codes), device=codes.device, dtype=dtype)
    grid = (cdiv(codes.numel(), _BYTES.value),)
    _decode_kernel[grid](
        codes, scales.scales, scales.table, out, codes.numel(), HALF_BLOCK=form.block // 2,
        FIRST_IS_HIGH=form.first_is_high, HAS_ZERO=form.num_factors == 2, num_warps=8,
    )  # fmt: skip
    return out
