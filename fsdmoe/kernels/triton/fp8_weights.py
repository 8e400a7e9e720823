"""Experts' weights in fp8, 128 x 128 or a whole matrix a scale, in both orientations.

fp8 matrix units want both operands with the contracted dim innermost, so the products that contract over a
weight's rows (d act, d x) need it transposed. One quantisation serves both: the codes are the same, and the
scales too. Sizes: E experts, A rows and B columns of a weight; D hidden, N expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.adamw_kernel import is_skipped
from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import (
    BLOCK,
    FP8,
    STRIDE,
    as_bits,
    as_bytes,
    as_words,
    block_scale,
    hidden_one,
    interleaved,
    raise_to,
    to_codes,
    transposed_tile,
)
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.precision.quantized_weight import WeightCodes

_NUM_WARPS = 8
_PIECE = tl.constexpr(16384)
"""Elements that one program looks at for the scale of a whole matrix."""


@QuickLaunch
@triton.jit
def _quantize_weight_kernel(
    weight_ptr,
    codes_ptr,
    transposed_ptr,
    scales_ptr,
    transposed_scales_ptr,
    given_ptr,
    found_inf_ptr,
    num_rows,
    num_columns,
    POWER_OF_TWO: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WHOLE: tl.constexpr,
    TRANSPOSED_SCALES: tl.constexpr,
    HAS_FLAG: tl.constexpr,
):
    if not is_skipped(found_inf_ptr, HAS_FLAG):
        block_b, block_a = tl.program_id(0), tl.program_id(1)
        base = tl.program_id(2).to(tl.int64) * num_rows * num_columns
        blocks_a, blocks_b = num_rows // 128, num_columns // 128
        rows = (block_a * 128 + interleaved()).to(tl.int64)
        lane = tl.arange(0, 128)
        at = base + rows[:, None] * num_columns + block_b * 128 + lane[None, :]
        values = tl.load(weight_ptr + at).to(tl.float32)
        of_expert = tl.program_id(2) * blocks_a * blocks_b
        place = of_expert + block_a * blocks_b + block_b
        if WHOLE:  # which is given
            place = tl.program_id(2)
            scale = tl.load(given_ptr + place)
        else:
            scale = block_scale(tl.max(tl.abs(values)), POWER_OF_TWO)
        inverse = tl.div_rn(1.0, scale)
        if PLAIN:
            tl.store(codes_ptr + at, to_codes(values * inverse))
            tl.store(scales_ptr + place, scale)
        if TRANSPOSED:
            codes = to_codes(values * (inverse * hidden_one(num_rows)))
            transposed_rows = (block_b * 128 + lane).to(tl.int64)
            words = block_a * 32 + tl.arange(0, 32)
            transposed_at = transposed_rows[:, None] * (num_rows // 4) + words[None, :]
            tl.store(as_words(transposed_ptr + base) + transposed_at, transposed_tile(codes, STRIDE, 128))
            if TRANSPOSED_SCALES:
                tl.store(transposed_scales_ptr + of_expert + block_b * blocks_a + block_a, scale)


def quantize_weight(
    weight_EAB: torch.Tensor,
    *,
    power_of_two: bool,
    plain: bool = True,
    transposed: bool = True,
) -> tuple[Codes, Codes]:
    """``(codes [E, A, B], codes [E, B, A])`` with a scale for 128 x 128 elements; of the one that is not
    asked for, empty tensors."""
    num_experts, num_rows, num_columns = weight_EAB.shape

    def empty(wanted: bool, a: int, b: int) -> Codes:
        experts = num_experts if wanted else 0
        codes = weight_EAB.new_empty(experts, a, b, dtype=FP8)
        return Codes(codes, weight_EAB.new_empty(experts, a // BLOCK, b // BLOCK, dtype=torch.float32))

    codes, codes_transposed = empty(plain, num_rows, num_columns), empty(transposed, num_columns, num_rows)
    flags = {"PLAIN": plain, "TRANSPOSED": transposed, "TRANSPOSED_SCALES": transposed}
    flags |= {"POWER_OF_TWO": power_of_two}
    _quantize_into(weight_EAB, codes, codes_transposed, flags)
    return codes, codes_transposed


def _quantize_into(
    weight_EAB: torch.Tensor,
    plain: Codes,
    transposed: Codes,
    flags: dict[str, bool],
    given_E: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    num_experts, num_rows, num_columns = weight_EAB.shape
    _quantize_weight_kernel[(num_columns // BLOCK, num_rows // BLOCK, num_experts)](
        weight_EAB,
        as_bytes(plain.codes),
        as_bytes(transposed.codes),
        plain.scales,
        transposed.scales,
        plain.scales if given_E is None else given_E,
        plain.scales if found_inf is None else found_inf,
        num_rows,
        num_columns,
        WHOLE=given_E is not None,
        HAS_FLAG=found_inf is not None,
        num_warps=_NUM_WARPS,
        **flags,
    )


def encode_weight_(
    main_EAB: torch.Tensor,
    into: WeightCodes,
    *,
    given_E: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """The same of main weights, of any precision, into buffers that are there.

    ``given_E``: the scales of whole matrices, where they are known. Nothing is written where ``found_inf`` is
    above 0."""
    plain, transposed, scales, power_of_two = into
    if given_E is None and not into.by_tiles:
        given_E = scales.zero_()
        _whole_scales_(main_EAB, given_E, power_of_two)
    other = Codes(plain if transposed is None else transposed, scales)
    flags = {"PLAIN": True, "TRANSPOSED": transposed is not None, "TRANSPOSED_SCALES": False}
    flags |= {"POWER_OF_TWO": power_of_two}
    _quantize_into(main_EAB, Codes(plain, scales), other, flags, given_E, found_inf)


@QuickLaunch
@triton.jit
def _whole_scales_kernel(weight_ptr, out_ptr, numel, POWER_OF_TWO: tl.constexpr):
    """Of each expert's weight: the largest of the scales of its pieces."""
    base = weight_ptr + tl.program_id(1).to(tl.int64) * numel
    at = tl.program_id(0) * _PIECE + tl.arange(0, _PIECE)
    values = tl.load(base + at, mask=at < numel, other=0.0).to(tl.float32)
    raise_to(out_ptr + tl.program_id(1), block_scale(tl.max(tl.abs(values)), POWER_OF_TWO))


def _whole_scales_(weight_EAB: torch.Tensor, out: torch.Tensor, power_of_two: bool) -> None:
    num_experts, numel = len(weight_EAB), weight_EAB[0].numel()
    _whole_scales_kernel[(cdiv(numel, _PIECE.value), num_experts)](
        weight_EAB, as_bits(out), numel, POWER_OF_TWO=power_of_two, num_warps=_NUM_WARPS
    )
