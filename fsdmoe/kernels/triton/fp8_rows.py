"""Rows to their experts in fp8, in the pass that permutes them anyway; and what little else goes by rows.

    quantize_rows    x [R, C] -> codes [M, C] with 1 x 128 scales [C/128, M]: the operand of forward and dgrad
                     (and in the order of x, where codes are kept for backward)
    decode_rows      codes [M, C] with such scales -> values
    expert_scales    row scales [C/128, M] -> the largest of each expert [E, C/128]
    sort_weights     routing weights [R, K] -> [M]
    sum_parts        partial sums [N/128, M] -> [R, K]

Scales lie block-major, so that a GEMM tile reads those of its 128 rows in one piece.
Sizes: R rows, K choices a row, C columns, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8, as_bytes, block_scale, from_codes, to_codes
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.kernels.triton.row_map import RowMap

_GROUPS = tl.constexpr(8)
"""Blocks of 128 columns that one program takes."""
_DECODED_ROWS = tl.constexpr(64)


class Codes(NamedTuple):
    """A quantised operand; what its scales belong to stands where it is made."""

    codes: torch.Tensor
    scales: torch.Tensor


def empty_codes(num_rows: int, num_columns: int, device: torch.device) -> Codes:
    """``[M, C]`` with 1 x 128 scales ``[C/128, M]``, to be written."""
    return Codes(
        torch.empty(num_rows, num_columns, device=device, dtype=FP8),
        torch.empty(num_columns // BLOCK, num_rows, device=device, dtype=torch.float32),
    )


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    kept_ptr,
    kept_scales_ptr,
    position_ptr,
    source_ptr,
    offsets_ptr,
    num_rows,
    num_columns,
    capacity,
    TOP_K: tl.constexpr,
    KEEP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    program = tl.program_id(0)
    groups = tl.program_id(1) * _GROUPS + tl.arange(0, _GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    blocks = num_columns // 128
    inside = groups < blocks
    if program < num_rows:
        row = program.to(tl.int64)
        values = tl.load(x_ptr + row * num_columns + columns, mask=inside[:, None], other=0.0).to(tl.float32)
        scales = block_scale(tl.max(tl.abs(values), 1), POWER_OF_TWO)
        codes = to_codes(values * tl.div_rn(1.0, scales)[:, None])
        if KEEP:
            tl.store(kept_ptr + row * num_columns + columns, codes, mask=inside[:, None])
            tl.store(kept_scales_ptr + groups * num_rows + row, scales, mask=inside)
        for choice in tl.static_range(TOP_K):
            place = tl.load(position_ptr + row * TOP_K + choice).to(tl.int64)
            keep = groups < tl.where(place >= 0, blocks, 0)
            tl.store(codes_ptr + place * num_columns + columns, codes, mask=keep[:, None])
            tl.store(scales_ptr + groups * capacity + place, scales, mask=keep)
    else:
        expert = program - num_rows
        end = tl.load(offsets_ptr + expert + 1)
        first = tl.maximum(end - 128, tl.load(offsets_ptr + expert))
        for step in range(end - first):
            place = first.to(tl.int64) + step
            keep = groups < tl.where(tl.load(source_ptr + place) < 0, blocks, 0)
            tl.store(
                codes_ptr + place * num_columns + columns,
                tl.zeros([_GROUPS, 128], tl.uint8),
                mask=keep[:, None],
            )
            tl.store(scales_ptr + groups * capacity + place, tl.zeros([_GROUPS], tl.float32), mask=keep)


def quantize_rows(
    x_RC: torch.Tensor, row_map: RowMap, *, power_of_two: bool, kept: Codes | None = None
) -> Codes:
    """Codes ``[M, C]`` and scales ``[C/128, M]`` of the rows in the map's order; padding is zero, scales too.

    A row is read and quantised once, and written to its K places; and to ``kept`` in the order of x."""
    num_rows, num_columns = x_RC.shape
    capacity = row_map.capacity
    made = empty_codes(capacity, num_columns, x_RC.device)
    own = made if kept is None else kept
    grid = (num_rows + row_map.num_experts, cdiv(num_columns, BLOCK * _GROUPS.value))
    _quantize_rows_kernel[grid](
        x_RC,
        as_bytes(made.codes),
        made.scales,
        as_bytes(own.codes),
        own.scales,
        row_map.position_RK,
        row_map.source_M,
        row_map.offsets,
        num_rows,
        num_columns,
        capacity,
        TOP_K=row_map.top_k,
        KEEP=kept is not None,
        POWER_OF_TWO=power_of_two,
        num_warps=4,
    )
    return made


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _decode_rows_kernel(codes_ptr, scales_ptr, out_ptr, num_rows, num_columns):
    rows = tl.program_id(0) * _DECODED_ROWS + tl.arange(0, _DECODED_ROWS)
    block = tl.program_id(1)
    inside = rows < num_rows
    scales = tl.load(scales_ptr + block.to(tl.int64) * num_rows + rows, mask=inside, other=0.0)
    at = rows.to(tl.int64)[:, None] * num_columns + block * 128 + tl.arange(0, 128)[None, :]
    values = from_codes(tl.load(codes_ptr + at, mask=inside[:, None], other=0)) * scales[:, None]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def decode_rows(codes_MC: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of codes ``[M, C]`` with scales ``[C/128, M]``."""
    num_rows, num_columns = codes_MC.shape
    out_MC = torch.empty(num_rows, num_columns, device=codes_MC.device, dtype=dtype)
    grid = cdiv(num_rows, _DECODED_ROWS.value), num_columns // BLOCK
    _decode_rows_kernel[grid](as_bytes(codes_MC), scales, out_MC, num_rows, num_columns, num_warps=4)
    return out_MC


@QuickLaunch
@triton.jit(do_not_specialize=["capacity"])
def _expert_scales_kernel(scales_ptr, out_ptr, offsets_ptr, capacity, blocks):
    expert, block = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    largest = tl.full([1024], 2.0**-100, tl.float32)
    for first in range(start, end, 1024):
        rows = first + tl.arange(0, 1024)
        here = tl.load(scales_ptr + block * capacity + rows, mask=rows < end, other=0.0)
        largest = tl.maximum(largest, here)
    tl.store(out_ptr + expert * blocks + block, tl.max(largest, 0))


def expert_scales(scales: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """``[E, C/128]``: what an operand with one scale for all tokens of an expert has, without reading it:
    the largest of the rows' scales is the scale of the largest element."""
    blocks, capacity = scales.shape
    out = torch.empty(row_map.num_experts, blocks, device=scales.device, dtype=torch.float32)
    grid = (row_map.num_experts, blocks)
    _expert_scales_kernel[grid](scales, out, row_map.offsets, capacity, blocks, num_warps=4)
    return out


@QuickLaunch
@triton.jit(do_not_specialize=["num_experts"])
def _sort_weights_kernel(weights_ptr, source_ptr, offsets_ptr, out_ptr, num_experts):
    rows = tl.program_id(0) * 128 + tl.arange(0, 128)
    if tl.program_id(0) * 128 < tl.load(offsets_ptr + num_experts):
        source = tl.load(source_ptr + rows)
        weights = tl.load(weights_ptr + source, mask=source >= 0, other=0.0)
        tl.store(out_ptr + rows, weights.to(tl.float32))


def sort_weights(weights_RK: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """``[M]`` fp32: each sorted row's routing weight, zero for padding."""
    out_M = torch.empty(row_map.capacity, device=weights_RK.device, dtype=torch.float32)
    _sort_weights_kernel[(row_map.capacity // BLOCK,)](
        weights_RK, row_map.source_M, row_map.offsets, out_M, row_map.num_experts, num_warps=4
    )
    return out_M


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "blocks", "num_experts"])
def _sum_parts_kernel(parts_ptr, source_ptr, offsets_ptr, out_ptr, capacity, blocks, num_experts):
    rows = tl.program_id(0) * 128 + tl.arange(0, 128)
    if tl.program_id(0) * 128 < tl.load(offsets_ptr + num_experts):
        total = tl.zeros([128], tl.float32)
        for block in range(blocks):
            total += tl.load(parts_ptr + block * capacity + rows)
        source = tl.load(source_ptr + rows)
        tl.store(out_ptr + source, total, mask=source >= 0)


def sum_parts_(parts: torch.Tensor, row_map: RowMap, out_RK: torch.Tensor) -> None:
    """The sum over blocks of ``[N/128, M]`` to each assignment that has a sorted row."""
    blocks, capacity = parts.shape
    _sum_parts_kernel[(capacity // BLOCK,)](
        parts, row_map.source_M, row_map.offsets, out_RK, capacity, blocks, row_map.num_experts, num_warps=4
    )
