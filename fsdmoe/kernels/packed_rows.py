"""Rows in eight bits for their way between ranks: E4M3 codes, and a scale for every 128 of them.

::

    x_RD   bf16  2 D bytes        ->   | D codes | D/128 scales |   1.008 D bytes, one row after the other

Scales are powers of two, stored as their exponents (E8M0), so the values at the other end are exact in bf16,
and packing them again changes no value. A block with an infinity or a NaN comes out as NaN: what overflows
must be seen by whoever skips steps.

Sizes: R rows, D width, B blocks of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdmoe.kernels.backend import triton_for
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import block_amax, block_scales, spread_blocks

BLOCK = 128
_SCALING = Scaling(E4M3, (1, BLOCK), "power_of_two")
_BIAS, _NAN = 127, 255  # of E8M0


def pack_rows(x_RD: Tensor) -> Tensor:
    """uint8 ``[R, D + B]``."""
    if (fused := _fused(x_RD)) is not None:
        return fused.pack_rows_triton(x_RD)
    x = x_RD.float()
    amax_RB = block_amax(x, _SCALING.block)
    scales_RB = block_scales(amax_RB, _SCALING).clamp(min=2.0**-_BIAS)
    codes = (x / spread_blocks(scales_RB, _SCALING.block, x.shape)).to(torch.float8_e4m3fn)
    exponents = torch.frexp(scales_RB).exponent - 1 + _BIAS
    exponents = torch.where(amax_RB.isfinite(), exponents, _NAN)
    return torch.cat((codes.view(torch.uint8), exponents.to(torch.uint8)), dim=1)


def _fused(rows: Tensor) -> Any:
    fused = triton_for(rows) if rows.numel() else None
    return fused if fused is not None and fused.supports_packing(rows.device) else None


def unpack_rows(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """``x_RD`` in ``dtype``."""
    if (fused := _fused(packed)) is not None:
        return fused.unpack_rows_triton(packed, width, dtype)
    codes, exponents = packed.split((width, packed.shape[1] - width), dim=1)
    scales_RB = torch.where(exponents == _NAN, torch.nan, torch.exp2(exponents.float() - _BIAS))
    values = codes.contiguous().view(torch.float8_e4m3fn).float()
    return (values * spread_blocks(scales_RB, _SCALING.block, values.shape)).to(dtype)
