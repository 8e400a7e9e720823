"""Rows to their experts and back: the two memory-bound passes around the grouped GEMMs.

``permute_rows`` is source-major: each row is read once and written to each of its K places, and the padding
of every expert is zeroed in the same launch. ``combine_rows`` sums a row's K results in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, block_of_columns, cdiv
from fsdmoe.kernels.triton.row_map import RowMap

# A program sums so many results: of one row where a block of columns fits their number, else of several.
_ELEMENTS = 1024
_MIN_BLOCK = 128


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _permute_kernel(
    x_ptr,
    out_ptr,
    position_ptr,
    source_ptr,
    offsets_ptr,
    clear_ptr,
    num_rows,
    num_columns,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    CLEAR: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if program < num_rows:
        row = program.to(tl.int64)
        values = tl.load(x_ptr + row * num_columns + columns, mask=columns < num_columns)
        for choice in tl.static_range(TOP_K):
            place = tl.load(position_ptr + row * TOP_K + choice).to(tl.int64)
            limit = tl.where(place >= 0, num_columns, 0)
            tl.store(out_ptr + place * num_columns + columns, values, mask=columns < limit)
            if CLEAR:
                tl.store(clear_ptr + row * TOP_K + choice, 0.0, mask=(place < 0) & (tl.program_id(1) == 0))
    else:
        expert = program - num_rows
        end = tl.load(offsets_ptr + expert + 1)
        first = tl.maximum(end - ALIGN, tl.load(offsets_ptr + expert))
        for step in range(end - first):
            place = first.to(tl.int64) + step
            limit = tl.where(tl.load(source_ptr + place) < 0, num_columns, 0)
            zeros = tl.zeros([COLUMNS], out_ptr.dtype.element_ty)
            tl.store(out_ptr + place * num_columns + columns, zeros, mask=columns < limit)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _combine_kernel(
    y_ptr,
    out_ptr,
    position_ptr,
    offsets_ptr,
    num_rows,
    num_columns,
    num_experts,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHECKED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(position_ptr + rows * TOP_K + choice, mask=rows < num_rows, other=-1)
        place = place.to(tl.int64)[:, None]
        limit = tl.where(place >= 0, num_columns, 0)
        here = tl.load(y_ptr + place * num_columns + columns, mask=columns < limit, other=0.0)
        total += here.to(tl.float32)
    if CHECKED:
        # Rows without a place would be missing from the sum: make it NaN instead of training on it.
        overflowed = tl.load(offsets_ptr + num_experts + 1) != 0
        total = tl.where(overflowed, float("nan"), total)
    tl.store(
        out_ptr + rows[:, None] * num_columns + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (columns < num_columns),
    )


def permute_rows(
    x_RD: torch.Tensor, row_map: RowMap, *, clear_RK: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows in the order of the map, ``[M, D]``, padding zero; past the last segment nothing is written.

    ``clear_RK`` (fp32) becomes zero at every assignment that has no sorted row."""
    num_rows, num_columns = x_RD.shape
    out_MD = torch.empty(row_map.capacity, num_columns, device=x_RD.device, dtype=x_RD.dtype)
    block = block_of_columns(num_columns)
    _permute_kernel[(num_rows + row_map.num_experts, cdiv(num_columns, block))](
        x_RD,
        out_MD,
        row_map.position_RK,
        row_map.source_M,
        row_map.offsets,
        row_map.offsets if clear_RK is None else clear_RK,
        num_rows,
        num_columns,
        TOP_K=row_map.top_k,
        COLUMNS=block,
        ALIGN=row_map.capacity // row_map.tile_expert.shape[0],
        CLEAR=clear_RK is not None,
        num_warps=4,
    )
    return out_MD


def combine_rows(y_MD: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """The inverse: each row's results summed over its choices in fp32, ``[R, D]``."""
    return _combine(y_MD, row_map.position_RK, row_map.offsets, row_map.num_experts)


def _combine(
    y_MD: torch.Tensor, position_RK: torch.Tensor, offsets: torch.Tensor | None, num_experts: int
) -> torch.Tensor:
    num_rows, top_k = position_RK.shape
    num_columns = y_MD.shape[1]
    out_RD = torch.empty(num_rows, num_columns, device=y_MD.device, dtype=y_MD.dtype)
    if out_RD.numel() == 0:
        return out_RD
    block = block_of_columns(num_columns)
    while block > _MIN_BLOCK and num_columns % block:
        block //= 2
    rows = max(1, _ELEMENTS // block)
    _combine_kernel[(cdiv(num_rows, rows), cdiv(num_columns, block))](
        y_MD,
        out_RD,
        position_RK,
        position_RK if offsets is None else offsets,
        num_rows,
        num_columns,
        num_experts,
        TOP_K=top_k,
        ROWS=rows,
        COLUMNS=block,
        CHECKED=offsets is not None,
        num_warps=4,
    )
    return out_RD


def take_rows_triton(x_RD: torch.Tensor, slots_RK: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Each row copied to its slots, ``[M, D]``; unassigned slots are not written."""
    num_rows, num_columns = x_RD.shape
    out_MD = torch.empty(num_slots, num_columns, device=x_RD.device, dtype=x_RD.dtype)
    block = block_of_columns(num_columns)
    if x_RD.numel() > 0 and num_slots > 0:
        _permute_kernel[(num_rows, cdiv(num_columns, block))](
            x_RD.contiguous(),
            out_MD,
            slots_RK,
            slots_RK,
            slots_RK,
            slots_RK,
            num_rows,
            num_columns,
            TOP_K=slots_RK.shape[1],
            COLUMNS=block,
            ALIGN=1,
            CLEAR=False,
            num_warps=4,
        )
    return out_MD


def sum_rows_triton(y_MD: torch.Tensor, slots_RK: torch.Tensor) -> torch.Tensor:
    """For each row the sum over its slots, in fp32 in the order of k; a slot of -1 adds nothing."""
    return _combine(y_MD.contiguous(), slots_RK, None, 0)
