"""An fp32 matrix as two of half its precision, side by side: ``[high | low]``, equal to their sum to 16 bits.

For products on tensor cores that may not lose a gradient's small digits. One pass instead of four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_BLOCK = 2048


@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _split_kernel(wide_ptr, out_ptr, num_elements, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    wide = tl.load(wide_ptr + at, mask=inside, other=0.0)
    high = wide.to(out_ptr.dtype.element_ty)
    low = (wide - high.to(tl.float32)).to(out_ptr.dtype.element_ty)
    place = at // columns * (2 * columns) + at % columns
    tl.store(out_ptr + place, high, mask=inside)
    tl.store(out_ptr + place + columns, low, mask=inside)


def split_halves(wide_TE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[T, 2E]`` in ``dtype``: the matrix rounded, then what the rounding left out."""
    num_rows, columns = wide_TE.shape
    out = torch.empty(num_rows, 2 * columns, device=wide_TE.device, dtype=dtype)
    if out.numel() > 0:
        grid = (cdiv(wide_TE.numel(), _BLOCK),)
        _split_kernel[grid](wide_TE.contiguous(), out, wide_TE.numel(), columns, BLOCK=_BLOCK, num_warps=4)
    return out
