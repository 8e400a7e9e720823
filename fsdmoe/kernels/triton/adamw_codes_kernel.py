"""AdamW and the codes of the new weights in one launch: the update of
:mod:`fsdmoe.kernels.triton.adamw_kernel`, the codes of :mod:`fsdmoe.kernels.triton.fp8_weights`, bit for bit.

A program updates a tile of 128 x 128 elements, and makes codes of main weights that are still in the cache:
one byte an element is written for each way round that codes lie, where plain AdamW writes two for weights in
bfloat16::

    a scale for each tile      codes of the tile that was updated
    one for a whole matrix     codes of the same tile of the matrix before, once all of that one is updated

A program waits only for programs with lower numbers, which have started before it.
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
_STRIDE = 32  # see interleaved
_NUM_WARPS = (8, 8)  # for main weights of two bytes, of four


@triton.jit
def _encode_tile(
    main_ptr, codes_ptr, turned_ptr, scale, base, num_rows, num_columns, block_a, block_b,
    TURNED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 128)
    columns = (block_b * 128 + lane).to(tl.int64)
    rows = (block_a * 128 + interleaved(STRIDE)).to(tl.int64)
    at = base + rows[:, None] * num_columns + columns[None, :]
    values = tl.load(main_ptr + at, cache_modifier=".cg").to(tl.float32)
    inverse = tl.div_rn(1.0, scale)
    tl.store(codes_ptr + at, to_codes(values * inverse))
    if TURNED:
        codes = to_codes(values * (inverse * hidden_one(num_rows)))
        turned_at = columns[:, None] * (num_rows // 4) + block_a * 32 + tl.arange(0, 32)[None, :]
        tl.store(as_words(turned_ptr + base) + turned_at, transposed(codes, STRIDE, 128))


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
    done_ptr,
    peaks_ptr,
    step_ptr,
    scale_ptr,
    found_inf_ptr,
    num_matrices,
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
    STRIDE: tl.constexpr,
):
    if not is_skipped(found_inf_ptr, HAS_FLAG):
        _, grad_scale, lr, correction2 = load_step(step_ptr, scale_ptr, lr, log_beta1, log_beta2, HAS_SCALE)
        num_tiles = (num_rows // 128) * (num_columns // 128)
        matrix, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
        block_a, block_b = tile // (num_columns // 128), tile % (num_columns // 128)
        base = matrix.to(tl.int64) * num_rows * num_columns
        if matrix < num_matrices:
            largest = tl.zeros([ROWS, 128], tl.float32)
            for first in tl.range(0, 128, ROWS):
                rows = (block_a * 128 + first + tl.arange(0, ROWS)).to(tl.int64)
                at = base + rows[:, None] * num_columns + block_b * 128 + tl.arange(0, 128)[None, :]
                main = update_block(
                    main_ptr, grad_ptr, exp_avg_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_sq_ptr, main_ptr,
                    0, grad_scale, lr, beta1, beta2, rest1, rest2, correction2, eps, decay, at, None, 0,
                    None, False, False, False, False, False,
                )  # fmt: skip
                # As it is stored: in bfloat16 it may be larger than it was.
                main = main.to(main_ptr.dtype.element_ty).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(main))
            scale = block_scale(tl.max(largest), POWER_OF_TWO)
            # Everything that this program wrote comes before what it, or another, goes on to read.
            tl.debug_barrier()
            if WHOLE:
                raise_to(peaks_ptr + matrix, scale)
                tl.atomic_add(done_ptr + matrix, 1)
            else:
                _encode_tile(
                    main_ptr, codes_ptr, turned_ptr, scale, base, num_rows, num_columns, block_a, block_b,
                    TURNED, STRIDE,
                )  # fmt: skip
                tl.store(scales_ptr + matrix * num_tiles + tile, scale)
        if WHOLE:  # noqa: SIM102 (one is decided when the kernel is compiled, the other when it runs)
            if matrix > 0:
                before = matrix - 1
                num_done = tl.atomic_add(done_ptr + before, 0)
                while num_done < num_tiles:
                    num_done = tl.atomic_add(done_ptr + before, 0)
                scale = tl.atomic_max(peaks_ptr + before, 0).to(tl.float32, bitcast=True)
                tl.debug_barrier()
                _encode_tile(
                    main_ptr, codes_ptr, turned_ptr, scale, base - num_rows * num_columns, num_rows,
                    num_columns, block_a, block_b, TURNED, STRIDE,
                )  # fmt: skip
                if tile == 0:
                    tl.store(scales_ptr + before, scale)


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
    state = torch.zeros(2, num_matrices, dtype=torch.int32, device=main.device) if whole else as_bits(scales)
    _adamw_codes_kernel[((num_matrices + whole) * num_tiles,)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        as_bytes(plain),
        as_bytes(plain if turned is None else turned),
        scales,
        state[0],
        state[-1],
        numbers.step,
        main if numbers.grad_scale is None else numbers.grad_scale,
        main if numbers.found_inf is None else numbers.found_inf,
        num_matrices,
        num_rows,
        num_columns,
        *factors(numbers),
        WHOLE=whole,
        TURNED=turned is not None,
        POWER_OF_TWO=power_of_two,
        HAS_SCALE=numbers.grad_scale is not None,
        HAS_FLAG=numbers.found_inf is not None,
        ROWS=_ROWS,
        STRIDE=_STRIDE,
        num_warps=_NUM_WARPS[main.dtype == torch.float32],
    )
