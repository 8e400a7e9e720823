"""AdamW and the codes of the new weights: the update of :mod:`fsdmoe.kernels.triton.adamw_kernel`, the codes
of :mod:`fsdmoe.kernels.triton.fp8_weights`, bit for bit.

A program updates a tile of 128 x 128 elements. One byte an element is written for each way round that codes
lie, where plain AdamW writes two for weights in bfloat16::

    a scale for each tile      by the same program, of main weights that are still in the cache
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
    interleaved,
    raise_to,
    to_codes,
    transposed,
)
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.weight_codes import TILE, WeightCodes

_ROWS = 16  # updated at a time
_PIECE = 128  # rows of a tile that are encoded at a time
_NUM_WARPS = 8
_MAX_REGISTERS = None


@triton.jit
def _encode_tile(
    main_ptr, codes_ptr, turned_ptr, scale, num_rows, num_columns, TURNED: tl.constexpr, PIECE: tl.constexpr
):
    """Pointers are to the tile's first element."""
    lane = tl.arange(0, 128)
    inverse = tl.div_rn(1.0, scale)
    for first in tl.range(0, 128, PIECE):
        at = (first + interleaved(PIECE // 4, PIECE))[:, None] * num_columns + lane[None, :]
        values = tl.load(main_ptr + at, cache_modifier=".cg").to(tl.float32)
        tl.store(codes_ptr + at, to_codes(values * inverse))
        if TURNED:
            codes = to_codes(values * (inverse * hidden_one(num_rows)))
            words = first // 4 + tl.arange(0, PIECE // 4)
            turned_at = lane[:, None] * (num_rows // 4) + words[None, :]
            tl.store(as_words(turned_ptr) + turned_at, transposed(codes, PIECE // 4, 128, PIECE))


@triton.jit
def _places(matrix, block_a, block_b, num_rows, num_columns):
    """Of a tile's first element, as it lies and transposed. Within a tile 32 bits are enough, which takes
    half the registers."""
    base, a, b = matrix.to(tl.int64) * num_rows * num_columns, block_a.to(tl.int64), block_b.to(tl.int64)
    return base + (a * num_columns + b) * 128, base + (b * num_rows + a) * 128


@QuickLaunch
@triton.jit
def _adamw_codes_kernel(
    main_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    codes_ptr,
    turned_ptr,
    scales_ptr,
    peaks_ptr,
    step_ptr,
    scale_ptr,
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
    TURNED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    if not is_skipped(found_inf_ptr, HAS_FLAG):
        _, grad_scale, lr, correction2 = load_step(step_ptr, scale_ptr, lr, log_beta1, log_beta2, HAS_SCALE)
        num_tiles = (num_rows // 128) * (num_columns // 128)
        matrix, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
        block_a, block_b = tile // (num_columns // 128), tile % (num_columns // 128)
        place, turned_place = _places(matrix, block_a, block_b, num_rows, num_columns)
        main_ptr += place
        grad_ptr += place
        exp_avg_ptr += place
        exp_avg_sq_ptr += place
        largest = tl.zeros([ROWS, 128], tl.float32)
        for first in tl.range(0, 128, ROWS):
            at = (first + tl.arange(0, ROWS))[:, None] * num_columns + tl.arange(0, 128)[None, :]
            main = update_block(
                main_ptr, grad_ptr, exp_avg_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_sq_ptr, main_ptr,
                0, grad_scale, lr, beta1, beta2, rest1, rest2, correction2, eps, decay, at, None, 0,
                None, False, False, False, False, False,
            )  # fmt: skip
            # As it is stored: in bfloat16 it may be larger than it was.
            main = main.to(main_ptr.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(main))
        scale = block_scale(tl.max(largest), POWER_OF_TWO)
        if WHOLE:
            raise_to(peaks_ptr + matrix, scale)
        else:
            tl.debug_barrier()  # everything that this program wrote comes before what it goes on to read
            _encode_tile(
                main_ptr, codes_ptr + place, turned_ptr + turned_place, scale, num_rows, num_columns, TURNED,
                PIECE,
            )  # fmt: skip
            tl.store(scales_ptr + matrix * num_tiles + tile, scale)


@QuickLaunch
@triton.jit
def _encode_whole_kernel(
    main_ptr, codes_ptr, turned_ptr, scales_ptr, peaks_ptr, found_inf_ptr, num_rows, num_columns,
    TURNED: tl.constexpr, HAS_FLAG: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    if not is_skipped(found_inf_ptr, HAS_FLAG):
        block_b, block_a, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        scale = tl.load(peaks_ptr + matrix)
        place, turned_place = _places(matrix, block_a, block_b, num_rows, num_columns)
        _encode_tile(
            main_ptr + place, codes_ptr + place, turned_ptr + turned_place, scale, num_rows, num_columns,
            TURNED, PIECE,
        )  # fmt: skip
        if block_a + block_b == 0:
            tl.store(scales_ptr + matrix, scale)


def adamw_codes_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamWStep,
    codes: WeightCodes,
) -> None:
    """Update one weight's flat buffers in place, and write its codes and scales."""
    plain, turned, scales, power_of_two = codes
    num_matrices, num_rows, num_columns = plain.shape
    num_tiles, whole = (num_rows // TILE) * (num_columns // TILE), not codes.by_tiles
    peaks = torch.zeros(num_matrices, device=main.device) if whole else scales
    has_flag = numbers.found_inf is not None
    flag = main if numbers.found_inf is None else numbers.found_inf
    into = as_bytes(plain), as_bytes(plain if turned is None else turned), scales
    _adamw_codes_kernel[(num_matrices * num_tiles,)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        *into,
        as_bits(peaks),
        numbers.step,
        main if numbers.grad_scale is None else numbers.grad_scale,
        flag,
        num_rows,
        num_columns,
        *factors(numbers),
        WHOLE=whole,
        TURNED=turned is not None,
        POWER_OF_TWO=power_of_two,
        HAS_SCALE=numbers.grad_scale is not None,
        HAS_FLAG=has_flag,
        ROWS=_ROWS,
        PIECE=_PIECE,
        num_warps=_NUM_WARPS,
        maxnreg=_MAX_REGISTERS,
    )
    if whole:
        _encode_whole_kernel[(num_columns // TILE, num_rows // TILE, num_matrices)](
            main,
            *into,
            peaks,
            flag,
            num_rows,
            num_columns,
            TURNED=turned is not None,
            HAS_FLAG=has_flag,
            PIECE=_PIECE,
            num_warps=_NUM_WARPS,
        )
