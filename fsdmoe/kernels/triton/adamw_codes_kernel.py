"""AdamW and the codes of the new weights: the update of :mod:`fsdmoe.kernels.triton.adamw_kernel`, the codes
of :mod:`fsdmoe.kernels.triton.fp8_weights`, bit for bit.

A program updates a tile of 128 x 128 elements. One byte an element is written for each way round that codes
lie, where plain AdamW writes two for weights in bfloat16::

    a scale for each tile      by the same program, which has all of the tile's new weights in registers
    one for a whole matrix     by another launch, once all of it is updated: what the cache holds of a matrix
                               by then is less than waiting for it costs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.triton.adamw_kernel import factors, is_skipped, load_step, update_block
from fsdmoe.kernels.triton.fp8_scale import (
    as_bits,
    as_bytes,
    as_words,
    block_scale,
    hidden_one,
    raise_to,
    to_codes,
)
from fsdmoe.kernels.triton.fp8_weights import encode_weight_
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.precision.quantized_weight import TILE, WeightCodes

_ROWS = tl.constexpr(16)  # updated at a time
_NUM_WARPS = 8
# By the bytes of a main weight: with a tile's in registers two programs still fit on a multiprocessor.
_OPTIONS_OF_TILES: dict[int, dict[str, int | None]] = {
    4: {"num_warps": 16, "maxnreg": 64},
    2: {"num_warps": 8, "maxnreg": None},
}


@triton.jit
def _places(matrix, block_a, block_b, num_rows, num_columns):
    """Of a tile's first element, as it lies and transposed. Within a tile 32 bits are enough, which takes
    half the registers."""
    base, a, b = matrix.to(tl.int64) * num_rows * num_columns, block_a.to(tl.int64), block_b.to(tl.int64)
    return base + (a * num_columns + b) * 128, base + (b * num_rows + a) * 128


@triton.jit
def _update(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, at):
    main = update_block(
        main_ptr, grad_ptr, exp_avg_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_sq_ptr, main_ptr, 0, settings,
        at, None, 0, None, False, False, False, False, False,
    )  # fmt: skip
    # As it is stored: in bfloat16 it may be larger than it was.
    return main.to(main_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _update_half(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, num_columns, HALF: tl.constexpr):
    """64 rows, every fourth of them in one result: codes of four results are then the bytes of words of the
    transpose, without a move between threads."""
    at = (HALF * 64 + 4 * tl.arange(0, 16))[:, None] * num_columns + tl.arange(0, 128)[None, :]
    first = _update(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, at)
    second = _update(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, at + num_columns)
    third = _update(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, at + 2 * num_columns)
    fourth = _update(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, at + 3 * num_columns)
    return first, second, third, fourth


@triton.jit
def _largest(first, second, third, fourth):
    return tl.maximum(tl.maximum(tl.abs(first), tl.abs(second)), tl.maximum(tl.abs(third), tl.abs(fourth)))


@triton.jit
def _encode_half(codes_ptr, first, second, third, fourth, inverse, num_rows, num_columns, HALF: tl.constexpr):
    """Stores codes as they lie; -> words of the transpose, ``[16, 128]``."""
    at = (HALF * 64 + 4 * tl.arange(0, 16))[:, None] * num_columns + tl.arange(0, 128)[None, :]
    tl.store(codes_ptr + at, to_codes(first * inverse))
    tl.store(codes_ptr + at + num_columns, to_codes(second * inverse))
    tl.store(codes_ptr + at + 2 * num_columns, to_codes(third * inverse))
    tl.store(codes_ptr + at + 3 * num_columns, to_codes(fourth * inverse))
    again = inverse * hidden_one(num_rows)
    words = to_codes(first * again).to(tl.int32) | (to_codes(second * again).to(tl.int32) << 8)
    words |= to_codes(third * again).to(tl.int32) << 16
    return words | (to_codes(fourth * again).to(tl.int32) << 24)


@QuickLaunch
@triton.jit
def _adamw_codes_kernel(
    main_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    codes_ptr,
    transposed_ptr,
    scales_ptr,
    peaks_ptr,
    step_ptr,
    found_inf_ptr,
    num_rows,
    num_columns,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    WHOLE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HAS_FLAG: tl.constexpr,
):
    if not is_skipped(found_inf_ptr, HAS_FLAG):
        _, lr, correction2 = load_step(step_ptr, lr, log_beta1, log_beta2)
        settings = (lr, beta1, beta2, rest1, rest2, correction2, eps, decay)
        num_tiles = (num_rows // 128) * (num_columns // 128)
        matrix, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
        block_a, block_b = tile // (num_columns // 128), tile % (num_columns // 128)
        place, transposed_place = _places(matrix, block_a, block_b, num_rows, num_columns)
        main_ptr += place
        grad_ptr += place
        exp_avg_ptr += place
        exp_avg_sq_ptr += place
        if WHOLE:
            largest = tl.zeros([_ROWS, 128], tl.float32)
            for row in tl.range(0, 128, _ROWS):
                at = (row + tl.arange(0, _ROWS))[:, None] * num_columns + tl.arange(0, 128)[None, :]
                main = _update(main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, at)
                largest = tl.maximum(largest, tl.abs(main))
            raise_to(peaks_ptr + matrix, block_scale(tl.max(largest), POWER_OF_TWO))
        else:
            a, b, c, d = _update_half(
                main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, num_columns, 0
            )
            e, f, g, h = _update_half(
                main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, settings, num_columns, 1
            )
            scale = block_scale(tl.max(tl.maximum(_largest(a, b, c, d), _largest(e, f, g, h))), POWER_OF_TWO)
            inverse = tl.div_rn(1.0, scale)
            upper = _encode_half(codes_ptr + place, a, b, c, d, inverse, num_rows, num_columns, 0)
            lower = _encode_half(codes_ptr + place, e, f, g, h, inverse, num_rows, num_columns, 1)
            if TRANSPOSED:
                words = tl.join(upper, lower).permute(1, 2, 0).reshape(128, 32)
                at = tl.arange(0, 128)[:, None] * (num_rows // 4) + tl.arange(0, 32)[None, :]
                tl.store(as_words(transposed_ptr + transposed_place) + at, words)
            tl.store(scales_ptr + matrix * num_tiles + tile, scale)


def adamw_codes_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamWStep,
    codes: WeightCodes,
) -> None:
    """Update one weight's flat buffers in place, and write its codes and scales."""
    plain, transposed, scales, power_of_two = codes
    num_matrices, num_rows, num_columns = plain.shape
    num_tiles, whole = (num_rows // TILE) * (num_columns // TILE), not codes.by_tiles
    peaks = torch.zeros(num_matrices, device=main.device) if whole else scales
    has_flag = numbers.found_inf is not None
    flag = main if numbers.found_inf is None else numbers.found_inf
    into = as_bytes(plain), as_bytes(plain if transposed is None else transposed), scales
    options = {"num_warps": _NUM_WARPS} if whole else _OPTIONS_OF_TILES[main.element_size()]
    _adamw_codes_kernel[(num_matrices * num_tiles,)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        *into,
        as_bits(peaks),
        numbers.step,
        flag,
        num_rows,
        num_columns,
        *factors(numbers),
        WHOLE=whole,
        TRANSPOSED=transposed is not None,
        POWER_OF_TWO=power_of_two,
        HAS_FLAG=has_flag,
        **options,
    )
    if whole:
        encode_weight_(main.view(plain.shape), codes, given_E=peaks, found_inf=numbers.found_inf)
