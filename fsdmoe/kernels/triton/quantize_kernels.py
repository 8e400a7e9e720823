"""fp8 codes of a matrix, as it lies and transposed, in one pass over it.

A program takes 128 x 128 elements. A scale is found in the tile where its block lies in one; scales of
longer blocks are given, from an earlier pass that only measures or from elsewhere. Equal to
``quantize_both_reference``, but that a block of zeros, or of next to nothing, has the scale 2^-100, so that
nothing is divided by zero.

Sizes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.fp8_operands import BLOCK, Both, Operand, Wanted, as_operand
from fsdmoe.kernels.triton.fp8_scale import (
    STRIDE,
    as_words,
    block_scale,
    hidden_one,
    interleaved,
    transposed_tile,
)
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.precision.formats import Scaling
from fsdmoe.precision.quantize import block_scales

_NUM_WARPS = 8
# What a program that finds the scales of rows reads at a time.
_SCALE_ROWS = tl.constexpr(4)
_SCALE_COLUMNS = tl.constexpr(1024)
# Where the scale of an element comes from.
_UNWANTED, _LINE, _TILE, _GIVEN = 0, 1, 2, 3


@triton.jit
def _codes_of(scaled, LARGEST: tl.constexpr, SOURCE: tl.constexpr):
    """As bytes. Only a scale that is given may be too small. What is not finite becomes not a number."""
    if SOURCE == 3:
        clipped = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.where(tl.abs(scaled) == float("inf"), float("nan"), clipped)
    if LARGEST == 448.0:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    transposed_ptr,
    scales_ptr,
    transposed_scales_ptr,
    num_rows,
    padded_rows,
    num_columns,
    row_stride,
    codes_stride,
    scales_stride,
    transposed_scales_stride,
    transposed_scales_line,
    ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LARGEST: tl.constexpr,
    TRANSPOSED_LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TRANSPOSED_POWER_OF_TWO: tl.constexpr,
):
    block_c, block_r = tl.program_id(0), tl.program_id(1)
    blocks_c, blocks_r = tl.num_programs(0), tl.num_programs(1)
    line, lane = interleaved(), tl.arange(0, 128)
    rows, columns = block_r * 128 + line, block_c * 128 + lane
    # To the tile: within it 32 bits are enough, which takes half the registers.
    first_row, first_column = block_r.to(tl.int64) * 128, block_c.to(tl.int64) * 128
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    x_ptr += first_row * row_stride + first_column
    values = tl.load(x_ptr + line[:, None] * row_stride + lane[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if ROWS != 0:
        if ROWS == 1:
            scales = block_scale(tl.max(tl.abs(values), 1), POWER_OF_TWO, LARGEST)
            tl.store(scales_ptr + block_c * padded_rows + rows, scales, mask=rows < padded_rows)
        elif ROWS == 2:
            scale = block_scale(tl.max(tl.abs(values)), POWER_OF_TWO, LARGEST)
            tl.store(scales_ptr + block_r * blocks_c + block_c, scale)
            scales = tl.zeros([128], tl.float32) + scale
        else:
            scales = tl.load(scales_ptr + rows * scales_stride, mask=rows < padded_rows, other=1.0)
            scales = tl.maximum(scales, 2.0**-100)
        codes = _codes_of(values * tl.div_rn(1.0, scales)[:, None], LARGEST, ROWS)
        keep = (rows < padded_rows)[:, None] & (columns < num_columns)[None, :]
        codes_ptr += first_row * codes_stride + first_column
        tl.store(codes_ptr + line[:, None] * codes_stride + lane[None, :], codes, mask=keep)
    if TRANSPOSED != 0:
        if TRANSPOSED == 1:
            scales = block_scale(tl.max(tl.abs(values), 0), TRANSPOSED_POWER_OF_TWO, TRANSPOSED_LARGEST)
            kept = columns < num_columns
            tl.store(transposed_scales_ptr + block_r * transposed_scales_line + columns, scales, mask=kept)
        elif TRANSPOSED == 2:
            scale = block_scale(tl.max(tl.abs(values)), TRANSPOSED_POWER_OF_TWO, TRANSPOSED_LARGEST)
            tl.store(transposed_scales_ptr + block_c * blocks_r + block_r, scale)
            scales = tl.zeros([128], tl.float32) + scale
        else:
            place = transposed_scales_ptr + columns * transposed_scales_stride
            scales = tl.maximum(tl.load(place, mask=columns < num_columns, other=1.0), 2.0**-100)
        inverse = tl.div_rn(1.0, scales) * hidden_one(num_columns)
        codes = _codes_of(values * inverse[None, :], TRANSPOSED_LARGEST, TRANSPOSED)
        word = tl.arange(0, 32)
        keep = (columns < num_columns)[:, None] & (block_r * 32 + word < padded_rows // 4)[None, :]
        transposed_ptr = as_words(transposed_ptr + (first_column * padded_rows + first_row))
        place = transposed_ptr + lane[:, None] * (padded_rows // 4) + word[None, :]
        tl.store(place, transposed_tile(codes, STRIDE, 128), mask=keep)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _measure_kernel(
    x_ptr,
    row_amax_ptr,
    column_amax_ptr,
    num_rows,
    num_columns,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block_c, block_r = tl.program_id(0), tl.program_id(1)
    rows = (block_r * 128 + tl.arange(0, 128)).to(tl.int64)
    columns = (block_c * 128 + tl.arange(0, 128)).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    values = tl.load(x_ptr + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)
    sizes = tl.abs(values.to(tl.float32))
    if ROWS:
        tl.store(row_amax_ptr + block_c * num_rows + rows, tl.max(sizes, 1), mask=rows < num_rows)
    if COLUMNS:
        place = column_amax_ptr + block_r * num_columns + columns
        tl.store(place, tl.max(sizes, 0), mask=columns < num_columns)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _row_scales_kernel(
    x_ptr, scales_ptr, num_rows, padded_rows, num_columns, row_stride,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    first_row, line = tl.program_id(0) * _SCALE_ROWS, tl.arange(0, _SCALE_ROWS)
    rows = first_row + line
    x_ptr += first_row.to(tl.int64) * row_stride
    largest = tl.zeros([_SCALE_ROWS, _SCALE_COLUMNS], tl.float32)
    for first in tl.range(0, num_columns, _SCALE_COLUMNS):
        columns = first + tl.arange(0, _SCALE_COLUMNS)
        inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        at = line[:, None] * row_stride + columns[None, :]
        values = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    scales = block_scale(tl.max(largest, 1), POWER_OF_TWO, LARGEST)
    tl.store(scales_ptr + rows, scales, mask=rows < padded_rows)


@QuickLaunch
@triton.jit
def _transpose_kernel(codes_ptr, transposed_ptr, num_rows, num_columns):
    base = tl.program_id(2).to(tl.int64) * num_rows * num_columns
    codes_ptr += base
    transposed_ptr += base
    rows = (tl.program_id(1) * 128 + interleaved()).to(tl.int64)
    columns = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    codes = tl.load(codes_ptr + rows[:, None] * num_columns + columns[None, :], mask=inside, other=0)
    words = (tl.program_id(1) * 32 + tl.arange(0, 32)).to(tl.int64)
    keep = (columns < num_columns)[:, None] & (words < num_rows // 4)[None, :]
    place = as_words(transposed_ptr) + columns[:, None] * (num_rows // 4) + words[None, :]
    tl.store(place, transposed_tile(codes, STRIDE, 128), mask=keep)


def transpose_codes_triton(codes: torch.Tensor) -> torch.Tensor:
    """Of one matrix ``[R, C]``, or of several behind each other: ``[C, R]``, the same bytes."""
    *matrices, num_rows, num_columns = codes.shape
    transposed = codes.new_empty(*matrices, num_columns, num_rows)
    grid = cdiv(num_columns, BLOCK), cdiv(num_rows, BLOCK), math.prod(matrices)
    _transpose_kernel[grid](
        codes.view(torch.uint8), transposed.view(torch.uint8), num_rows, num_columns, num_warps=_NUM_WARPS
    )
    return transposed


class _Amax(NamedTuple):
    """The largest magnitudes of each row in 128 columns, and of each column in 128 rows."""

    rows: torch.Tensor
    columns: torch.Tensor


def _grid(x_RC: torch.Tensor, num_rows: int) -> tuple[int, int]:
    return cdiv(x_RC.shape[1], BLOCK), cdiv(num_rows, BLOCK)


def _measure(x_RC: torch.Tensor, *, rows: bool, columns: bool) -> _Amax:
    num_rows, num_columns = x_RC.shape
    grid = _grid(x_RC, num_rows)
    found = _Amax(
        torch.empty(grid[0] if rows else 0, num_rows, device=x_RC.device, dtype=torch.float32),
        torch.empty(grid[1] if columns else 0, num_columns, device=x_RC.device, dtype=torch.float32),
    )
    _measure_kernel[grid](
        x_RC, *found, num_rows, num_columns, x_RC.stride(0), ROWS=rows, COLUMNS=columns, num_warps=_NUM_WARPS
    )
    return found


def quantize_both_triton(
    x_RC: torch.Tensor, rows: Wanted | None, transposed: Wanted | None, padded_rows: int
) -> Both:
    """``quantize_both_reference`` by kernels."""
    rows, transposed = _with_scales(x_RC, rows, transposed, padded_rows)
    num_columns = x_RC.shape[1]
    plain = _Way(rows, padded_rows, num_columns, x_RC.device)
    other = _Way(transposed, num_columns, padded_rows, x_RC.device)
    into = plain.codes.view(torch.uint8), other.codes.view(torch.uint8), plain.scales, other.scales
    _quantize_into(x_RC, into, plain, other, padded_rows, num_columns)
    return Both(plain.operand(), other.operand())


def quantize_side_by_side_triton(
    parts_RC: Sequence[torch.Tensor], rows: Wanted, transposed: Wanted, padded_rows: int
) -> Both:
    """``quantize_both_triton`` of matrices next to each other, with scales of 1 x 128 both ways, which lie in
    one part each: every part is read where it is."""
    num_columns, device = sum(part.shape[1] for part in parts_RC), parts_RC[0].device
    plain = _Way(rows, padded_rows, num_columns, device)
    other = _Way(transposed, num_columns, padded_rows, device)
    assert (plain.source, other.source) == (_LINE, _LINE)
    first = 0
    for part in parts_RC:
        into = (
            plain.codes.view(torch.uint8)[:, first:],
            other.codes.view(torch.uint8)[first:],
            plain.scales[first // BLOCK :],
            other.scales[:, first:],
        )
        _quantize_into(part, into, plain, other, padded_rows, num_columns)
        first += part.shape[1]
    return Both(plain.operand(), other.operand())


def _quantize_into(
    x_RC: torch.Tensor,
    into: tuple[torch.Tensor, ...],
    plain: _Way,
    other: _Way,
    padded_rows: int,
    num_columns: int,
) -> None:
    """Codes as they lie and transposed, and the scales of both, of ``num_columns`` that lie next to each
    other."""
    _quantize_kernel[_grid(x_RC, padded_rows)](
        x_RC,
        *into,
        len(x_RC),
        padded_rows,
        x_RC.shape[1],
        x_RC.stride(0),
        num_columns,
        plain.stride,
        other.stride,
        num_columns,
        ROWS=plain.source,
        TRANSPOSED=other.source,
        LARGEST=plain.largest,
        TRANSPOSED_LARGEST=other.largest,
        POWER_OF_TWO=plain.power_of_two,
        TRANSPOSED_POWER_OF_TWO=other.power_of_two,
        num_warps=_NUM_WARPS,
    )


class _Way:
    """What the kernel is told of one way round, and what it writes."""

    def __init__(self, wanted: Wanted | None, num_rows: int, num_columns: int, device: torch.device) -> None:
        self.scaling = None if wanted is None else wanted.scaling
        self.stride, self.largest, self.power_of_two = 0, 448.0, False
        self.given: torch.Tensor | None = None
        if wanted is None:
            self.source = _UNWANTED
            self.codes = torch.empty(0, dtype=torch.uint8, device=device)
            self.scales = torch.empty(0, device=device)
            return
        scaling, given = wanted
        self.largest, self.power_of_two = scaling.element.largest, scaling.scale == "power_of_two"
        self.codes = torch.empty(num_rows, num_columns, dtype=scaling.element.dtype, device=device)
        self.given = given
        if given is not None:
            self.source, self.stride = _GIVEN, int(given.numel() > 1)
            self.scales = given if given.numel() in (1, num_rows) else given.repeat_interleave(BLOCK, 0)
        elif scaling.block[0] == 1:
            self.source = _LINE
            self.scales = torch.empty(cdiv(num_columns, BLOCK), num_rows, device=device)
        else:
            self.source = _TILE
            self.scales = torch.empty(cdiv(num_rows, BLOCK), cdiv(num_columns, BLOCK), device=device)

    def operand(self) -> Operand | None:
        if self.scaling is None:
            return None
        if self.given is not None:
            return as_operand(self.codes, self.given, self.scaling)
        return Operand(self.codes, self.scales, "block" if self.source == _LINE else "square")


def _row_scales(x_RC: torch.Tensor, scaling: Scaling, padded_rows: int) -> torch.Tensor:
    """``[R', 1]`` in one launch: a handful of torch's own for so few numbers would take as long again."""
    num_rows, num_columns = x_RC.shape
    scales = torch.empty(padded_rows, 1, device=x_RC.device)
    _row_scales_kernel[(cdiv(padded_rows, _SCALE_ROWS.value),)](
        x_RC,
        scales,
        num_rows,
        padded_rows,
        num_columns,
        x_RC.stride(0),
        LARGEST=scaling.element.largest,
        POWER_OF_TWO=scaling.scale == "power_of_two",
        num_warps=4,
    )
    return scales


def _with_scales(
    x_RC: torch.Tensor, rows: Wanted | None, transposed: Wanted | None, padded_rows: int
) -> tuple[Wanted | None, Wanted | None]:
    """The same with the scales of all blocks that are longer than a tile."""
    by_columns = _is_unknown(transposed) and not _is_whole(transposed)
    if not (_is_unknown(rows) or _is_unknown(transposed)):
        return rows, transposed
    if rows is not None and _is_unknown(rows) and rows.scaling.block[0] == 1 and not _is_unknown(transposed):
        return Wanted(rows.scaling, _row_scales(x_RC, rows.scaling, padded_rows)), transposed
    found = _measure(x_RC, rows=_is_unknown(rows) or not by_columns, columns=by_columns)
    if _is_unknown(rows):
        rows = _scaled(rows, found.rows, padded_rows)
    if _is_unknown(transposed):
        transposed = _scaled(transposed, found.columns if by_columns else found.rows, x_RC.shape[1])
    return rows, transposed


def _is_unknown(wanted: Wanted | None) -> bool:
    return wanted is not None and wanted.scales_BB is None and wanted.scaling.block[1] is None


def _is_whole(wanted: Wanted | None) -> bool:
    return wanted is not None and wanted.scaling.block == (None, None)


def _scaled(wanted: Wanted | None, amax_BR: torch.Tensor, num_rows: int) -> Wanted:
    """With the scales that follow from the largest magnitudes of rows in blocks of columns."""
    assert wanted is not None
    scaling, size = wanted.scaling, wanted.scaling.block[0]
    if size is None:
        return Wanted(scaling, block_scales(amax_BR.amax().view(1, 1), scaling))
    amax_R = torch.nn.functional.pad(amax_BR.amax(0), (0, num_rows - amax_BR.shape[1]))
    return Wanted(scaling, block_scales(amax_R.view(-1, size).amax(1, keepdim=True), scaling))
