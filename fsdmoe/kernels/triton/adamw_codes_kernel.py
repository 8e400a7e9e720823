"""AdamW and the codes of the new weights in one pass: the update of :mod:`fsdmoe.kernels.triton.adamw_kernel`
and the codes of :mod:`fsdmoe.kernels.triton.fp8_weights`, bit for bit.

A program updates one tile of 128 x 128 elements, which share a scale, and then reads its main weights again,
which are still in the cache: one byte an element is written for each way round that codes lie, where plain
AdamW writes two for weights in bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.triton.adamw_kernel import _one_minus_exp, _update, factors
from fsdmoe.kernels.triton.fp8_scale import as_bytes, block_scale, interleaved, to_codes, transposed
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.weight_codes import TILE, WeightCodes

_ROWS = 16  # updated at a time
_COLUMNS = 64  # encoded at a time
_STRIDE = 16  # see interleaved
_NUM_WARPS = 8


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
    TURNED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    skipped = False
    if HAS_FLAG:
        skipped = tl.load(found_inf_ptr) > 0
    if not skipped:
        step = tl.load(step_ptr)
        grad_scale = 1.0
        if HAS_SCALE:
            grad_scale = tl.load(scale_ptr)
        correction2 = _one_minus_exp(step * log_beta2)
        lr = lr / _one_minus_exp(step * log_beta1)
        block_b, block_a = tl.program_id(0), tl.program_id(1)
        base = tl.program_id(2).to(tl.int64) * num_rows * num_columns
        lane = tl.arange(0, 128)
        largest = tl.zeros([ROWS, 128], tl.float32)
        for first in tl.range(0, 128, ROWS):
            rows = (block_a * 128 + first + tl.arange(0, ROWS)).to(tl.int64)
            at = base + rows[:, None] * num_columns + block_b * 128 + lane[None, :]
            main = _update(
                main_ptr, grad_ptr, exp_avg_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_sq_ptr, main_ptr, 0,
                grad_scale, lr, beta1, beta2, rest1, rest2, correction2, eps, decay, at, None, 0, None,
                False, False, False, False, False,
            )  # fmt: skip
            # As it is stored: in bfloat16 it may be larger than it was.
            main = main.to(main_ptr.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(main))
        scale = block_scale(tl.max(largest), POWER_OF_TWO)
        # What other threads of this program have written is read below.
        tl.debug_barrier()
        inverse = tl.div_rn(1.0, scale)
        rows = (block_a * 128 + interleaved(STRIDE)).to(tl.int64)
        for first in tl.range(0, 128, COLUMNS):
            columns = block_b * 128 + first + tl.arange(0, COLUMNS)
            at = base + rows[:, None] * num_columns + columns[None, :]
            codes = to_codes(tl.load(main_ptr + at).to(tl.float32) * inverse)
            tl.store(codes_ptr + at, codes)
            if TURNED:
                turned_at = base + columns.to(tl.int64)[:, None] * num_rows + block_a * 128 + lane[None, :]
                tl.store(turned_ptr + turned_at, transposed(codes, STRIDE, COLUMNS))
        tile = (tl.program_id(2) * (num_rows // 128) + block_a) * (num_columns // 128) + block_b
        tl.store(scales_ptr + tile, scale)


def adamw_codes_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamWStep,
    codes: WeightCodes,
) -> None:
    """Update one weight's flat buffers in place, and write its codes, which have scales by tiles."""
    plain, turned, scales, power_of_two = codes
    num_matrices, num_rows, num_columns = plain.shape
    _adamw_codes_kernel[(num_columns // TILE, num_rows // TILE, num_matrices)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        as_bytes(plain),
        as_bytes(plain if turned is None else turned),
        scales,
        numbers.step,
        main if numbers.grad_scale is None else numbers.grad_scale,
        main if numbers.found_inf is None else numbers.found_inf,
        num_rows,
        num_columns,
        *factors(numbers),
        TURNED=turned is not None,
        POWER_OF_TWO=power_of_two,
        HAS_SCALE=numbers.grad_scale is not None,
        HAS_FLAG=numbers.found_inf is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STRIDE=_STRIDE,
        num_warps=_NUM_WARPS,
    )
