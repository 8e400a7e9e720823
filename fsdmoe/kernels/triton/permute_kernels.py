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

# A program holds so many values: of one row where a block of columns fits their number, else of several.
_ELEMENTS = 1024
_MIN_BLOCK = 128


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_padded"])
def _permute_kernel(
    x_ptr,
    out_ptr,
    position_ptr,
    source_ptr,
    offsets_ptr,
    clear_ptr,
    num_rows,
    num_columns,
    columns_a_program,
    num_padded,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    CLEAR: tl.constexpr,
):
    program = tl.program_id(0)
    first_column = tl.program_id(1) * columns_a_program
    last_column = tl.minimum(first_column + columns_a_program, num_columns)
    if program < num_padded:
        end = tl.load(offsets_ptr + program + 1)
        first = tl.maximum(end - ALIGN, tl.load(offsets_ptr + program))
        zeros = tl.zeros([ROWS, COLUMNS], out_ptr.dtype.element_ty)
        for start in tl.range(first, end, ROWS):
            places = start + tl.arange(0, ROWS)
            source = tl.load(source_ptr + places, mask=places < end, other=0)
            is_padding = (source < 0)[:, None]
            places = places.to(tl.int64)[:, None]
            for column in tl.range(first_column, last_column, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)[None, :]
                inside = is_padding & (columns < num_columns)
                tl.store(out_ptr + places * num_columns + columns, zeros, mask=inside)
    else:
        rows = (program - num_padded) * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_rows
        rows = rows.to(tl.int64)
        if CLEAR:
            is_mine = rows < tl.where(first_column == 0, num_rows, 0)
            for choice in tl.static_range(TOP_K):
                at = rows * TOP_K + choice
                missing = tl.load(position_ptr + at, mask=is_mine, other=0) < 0
                tl.store(clear_ptr + at, tl.zeros([ROWS], tl.float32), mask=missing)
        for column in tl.range(first_column, last_column, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)[None, :]
            inside = columns < num_columns
            at_row = rows[:, None] * num_columns + columns
            values = tl.load(x_ptr + at_row, mask=is_row[:, None] & inside)
            for choice in tl.static_range(TOP_K):
                place = tl.load(position_ptr + rows * TOP_K + choice, mask=is_row, other=-1)
                place = place.to(tl.int64)[:, None]
                tl.store(out_ptr + place * num_columns + columns, values, mask=(place >= 0) & inside)


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
    inside = columns < num_columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(position_ptr + rows * TOP_K + choice, mask=rows < num_rows, other=-1)
        place = place.to(tl.int64)[:, None]
        here = tl.load(y_ptr + place * num_columns + columns, mask=(place >= 0) & inside, other=0.0)
        total += here.to(tl.float32)
    if CHECKED:
        # Rows without a place would be missing from the sum: make it NaN instead of training on it.
        overflowed = tl.load(offsets_ptr + num_experts + 1) != 0
        total = tl.where(overflowed, float("nan"), total)
    tl.store(
        out_ptr + rows[:, None] * num_columns + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & inside,
    )


def permute_rows(
    x_RD: torch.Tensor, row_map: RowMap, *, clear_RK: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows in the order of the map, ``[M, D]``, padding zero; past the last segment nothing is written.

    ``clear_RK`` (fp32) becomes zero at every assignment that has no sorted row."""
    num_rows, num_columns = x_RD.shape
    out_MD = torch.empty(row_map.capacity, num_columns, device=x_RD.device, dtype=x_RD.dtype)
    rows, columns, columns_a_program = _tile(num_columns)
    # Padding first: its programs walk a tile of an expert, and would begin when all others end.
    num_padded = row_map.num_experts
    _permute_kernel[(num_padded + cdiv(num_rows, rows), cdiv(num_columns, columns_a_program))](
        x_RD,
        out_MD,
        row_map.position_RK,
        row_map.source_M,
        row_map.offsets,
        row_map.offsets if clear_RK is None else clear_RK,
        num_rows,
        num_columns,
        columns_a_program,
        num_padded,
        TOP_K=row_map.top_k,
        ROWS=rows,
        COLUMNS=columns,
        ALIGN=row_map.capacity // row_map.tile_expert.shape[0],
        CLEAR=clear_RK is not None,
        num_warps=4,
    )
    return out_MD


def _tile(num_columns: int) -> tuple[int, int, int]:
    """Rows and columns that a program holds, and how many columns it walks: of one row a block, where blocks
    of that size fit the width, else whole rows of several."""
    columns = block_of_columns(num_columns)
    while columns > _MIN_BLOCK and num_columns % columns:
        columns //= 2
    rows = max(1, _ELEMENTS // columns)
    return rows, columns, columns if rows == 1 else num_columns


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
    rows, columns, _ = _tile(num_columns)
    _combine_kernel[(cdiv(num_rows, rows), cdiv(num_columns, columns))](
        y_MD,
        out_RD,
        position_RK,
        position_RK if offsets is None else offsets,
        num_rows,
        num_columns,
        num_experts,
        TOP_K=top_k,
        ROWS=rows,
        COLUMNS=columns,
        CHECKED=offsets is not None,
        num_warps=4,
    )
    return out_RD


def take_rows_triton(x_RD: torch.Tensor, slots_RK: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Each row copied to its slots, ``[M, D]``; unassigned slots are not written."""
    num_rows, num_columns = x_RD.shape
    out_MD = torch.empty(num_slots, num_columns, device=x_RD.device, dtype=x_RD.dtype)
    if x_RD.numel() > 0 and num_slots > 0:
        rows, columns, columns_a_program = _tile(num_columns)
        _permute_kernel[(cdiv(num_rows, rows), cdiv(num_columns, columns_a_program))](
            x_RD.contiguous(),
            out_MD,
            slots_RK,
            slots_RK,
            slots_RK,
            slots_RK,
            num_rows,
            num_columns,
            columns_a_program,
            0,
            TOP_K=slots_RK.shape[1],
            ROWS=rows,
            COLUMNS=columns,
            ALIGN=1,
            CLEAR=False,
            num_warps=4,
        )
    return out_MD


def sum_rows_triton(y_MD: torch.Tensor, slots_RK: torch.Tensor) -> torch.Tensor:
    """For each row the sum over its slots, in fp32 in the order of k; a slot of -1 adds nothing."""
    return _combine(y_MD.contiguous(), slots_RK, None, 0)
