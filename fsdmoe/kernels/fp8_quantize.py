"""Operands of fp8 products (``fp8_operands``), quantised both ways round, by a kernel where one can run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.fp8_operands import BLOCK, Both, Operand, Wanted, quantize_both_reference
from fsdmoe.precision.formats import Scaling


def quantize_both(x_RC: Tensor, rows: Wanted | None, transposed: Wanted | None, *, pad: bool = True) -> Both:
    """``x`` as it lies, ``[R', C]``, and transposed, ``[C, R']``; ``pad`` rounds R' up to whole blocks."""
    padded = -(-len(x_RC) // BLOCK) * BLOCK if pad else len(x_RC)
    fused = triton_for(x_RC)
    if fused is not None:
        x_RC = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
        return fused.quantize_both_triton(x_RC, rows, transposed, padded)
    return quantize_both_reference(x_RC, rows, transposed, padded)


def quantize_side_by_side(parts_RC: Sequence[Tensor], rows: Scaling, transposed: Scaling) -> Both:
    """:func:`quantize_both` of matrices next to each other, ``[R, C1 + C2 + ...]``, each a multiple of 128
    wide, with blocks of 1 x 128 both ways round."""
    padded = -(-len(parts_RC[0]) // BLOCK) * BLOCK
    fused = triton_for(parts_RC[0])
    if fused is not None:
        parts_RC = [part if part.stride(1) == 1 else part.contiguous() for part in parts_RC]
        return fused.quantize_side_by_side_triton(parts_RC, Wanted(rows), Wanted(transposed), padded)
    return quantize_both_reference(torch.cat(list(parts_RC), 1), Wanted(rows), Wanted(transposed), padded)


def decode(operand: Operand, dtype: torch.dtype) -> Tensor:
    """What codes with scales of 1 x 128 stand for."""
    fused = triton_for(operand.scales)
    if fused is not None:
        return fused.decode_rows(operand.codes_RC, operand.scales, dtype)
    return operand.values().to(dtype)


def transpose_codes(codes_RC: Tensor) -> Tensor:
    """``[C, R]``, the same bytes."""
    fused = triton_for(codes_RC.new_empty(0, dtype=torch.bfloat16))
    if fused is None:
        return codes_RC.t().contiguous()
    return fused.transpose_codes_triton(codes_RC)
