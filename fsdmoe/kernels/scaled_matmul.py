"""Matrix products in fp8: torch's own, on Hopper's matrix units.

What torch (2.11 to 2.13) has for compute capability 9.0, all of it cuBLAS's from CUDA 12.9 on:

======================  ======================================================================================
``tensor``, ``row``     ``torch._scaled_mm``; one scale for each operand, or one a row of both. Mixed ones are
                        written out for every row
``block`` x ``square``  ``torch._scaled_mm_v2``, below ``torch.nn.functional.scaled_mm``: 1 x 128 with 128 x
                        128; scales of a square operand are padded to fours along the contraction
``block`` x ``block``   the same, 1 x 128 with 1 x 128
======================  ======================================================================================

Results are float32, bfloat16 or float16. On other devices all are multiplied in float32: torch has products
in fp8 for some CPUs only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from fsdmoe.kernels.fp8_operands import Operand

_RECIPES = {"block": ScalingType.BlockWise1x128.value, "square": ScalingType.BlockWise128x128.value}


def scaled_matmul(
    first: Operand, second: Operand, dtype: torch.dtype, *, out_MN: Tensor | None = None
) -> Tensor:
    """``first @ second.T`` in ``dtype``, accumulated in float32; ``out`` has that dtype too."""
    if not first.codes_RC.is_cuda:
        product = (first.values() @ second.values().t()).to(dtype)
        return product if out_MN is None else out_MN.copy_(product)
    if first.kind in _RECIPES:
        return _by_blocks(first, second, dtype, out_MN)
    return _by_rows(first, second, dtype, out_MN)


def _by_rows(first: Operand, second: Operand, dtype: torch.dtype, out_MN: Tensor | None) -> Tensor:
    codes, scales = (first.codes_RC, second.codes_RC.t()), (first.scales, second.scales)
    if {first.kind, second.kind} != {"tensor"}:
        scales = (
            scales[0].reshape(-1, 1).expand(len(first.codes_RC), 1).contiguous(),
            scales[1].reshape(1, -1).expand(1, len(second.codes_RC)).contiguous(),
        )
    if out_MN is None:
        return torch._scaled_mm(*codes, *scales, out_dtype=dtype, use_fast_accum=False)
    return torch._scaled_mm(*codes, *scales, out_dtype=dtype, use_fast_accum=False, out=out_MN)


def _by_blocks(first: Operand, second: Operand, dtype: torch.dtype, out_MN: Tensor | None) -> Tensor:
    # Accumulation is promoted to float32 block by block, whatever is asked for.
    arguments: Any = (
        first.codes_RC, second.codes_RC.t(), [first.scales.t()], [_RECIPES[first.kind]], [],
        [block_scales_as_read(second)], [_RECIPES[second.kind]], [], None, dtype,
    )  # fmt: skip
    if out_MN is None:
        return torch.ops.aten._scaled_mm_v2.default(*arguments)
    return torch.ops.aten._scaled_mm_v2.out(*arguments, out=out_MN)


def block_scales_as_read(operand: Operand) -> Tensor:
    """``[R, C / 128]`` with rows innermost, or ``[C / 128 in fours, R / 128]`` with the contraction
    innermost."""
    if operand.kind == "block":
        return operand.scales.t()
    missing = -operand.scales.shape[1] % 4
    scales = F.pad(operand.scales, (0, missing)) if missing else operand.scales  # which would be a copy
    return scales.t()
