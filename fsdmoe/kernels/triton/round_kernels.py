"""Operands of emulated products, rounded by a recipe in one or two passes, as numbers of bf16.

Nothing is lost in bf16, whose eight bits hold a code times a power of two (MXFP8) and a code times an E4M3
scale (NVFP4). A float32 scale that a row or a whole operand shares is kept out of the numbers: it is a factor
of the product. So matrix units multiply exactly what a recipe rounds to.

A matrix lies as ``[rows, columns]`` and is contracted over its columns, or over its rows where its transpose
is the operand (``transposed``); it stays in memory as it is. Its rows fall into *segments*, operands of their
own: those of an expert.
Equal to :mod:`fsdmoe.precision.quantize` bit for bit, but for chance, and for the sums of rotations.

Sizes: M rows, C columns, S segments.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_scale import as_bits
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.kernels.triton.row_map import RowMap
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import block_scales, hadamard, inverse_of

ALIGN = 64
"""Of segments, where there are several: a tile of rows lies in one."""
_ROWS, _COLUMNS = 32, 128
# What shares a scale that lies in more than one tile.
_LINE, _SEGMENTS_COLUMN, _SEGMENT = 1, 2, 3


class Segments(NamedTuple):
    """Which rows of a matrix are an operand of their own: of equal lengths, or by a map."""

    num_segments: int
    num_rows: int
    row_map: RowMap | None = None

    @property
    def rows_a_tile(self) -> int:
        """Rows of a segment, or of an entry in the map."""
        if self.row_map is None:
            return self.num_rows // self.num_segments
        return self.num_rows // self.row_map.tile_expert.shape[0]


def mapped(row_map: RowMap) -> Segments:
    return Segments(row_map.num_experts, row_map.capacity, row_map)


class Rounded(NamedTuple):
    """An operand; past the last segment of a map it is undefined."""

    values_MC: torch.Tensor
    factors: torch.Tensor | None
    """What the rows of a product have to be multiplied by: ``[M]``, or ``[S, C]`` where it is transposed."""


@triton.jit
def _values(
    x_ptr, matrix_ptr, row, column, end, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (rows < end)[:, None] & (columns < num_columns)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], mask=inside, other=0.0)
    if ROTATED == 1:
        line = tl.arange(0, COLUMNS)
        x = tl.dot(x, tl.load(matrix_ptr + line[:, None] * COLUMNS + line[None, :]))
    elif ROTATED == 2:
        line = tl.arange(0, ROWS)
        x = tl.dot(tl.load(matrix_ptr + line[:, None] * ROWS + line[None, :]), x)
    return x.to(tl.float32)


@triton.jit
def _segment_of(row, offsets_ptr, tile_ptr, num_rows, num_segments, rows_a_tile, MAPPED: tl.constexpr):
    """A row's segment, and where the rows end."""
    if MAPPED:
        end = tl.load(offsets_ptr + num_segments)
        return tl.load(tile_ptr + row // rows_a_tile, mask=row < end, other=0), end
    return row // rows_a_tile, num_rows


@triton.jit
def _magnitude(values):
    """As integers, which compare as magnitudes do; what is not a number is the largest of all."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(
    x, draw, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, CHANCE: tl.constexpr
):
    """The nearest number of a format, ties to even; or one of the two next to it, by chance."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, SMALLEST + 127) - MANTISSA
    step = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if CHANCE:
        whole = tl.floor(scaled + draw)
    else:
        whole = (scaled + 12582912.0) - 12582912.0  # 1.5 x 2^23: no fraction fits next to it
    return tl.clamp(whole * step, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _amax_kernel(
    x_ptr,
    amax_ptr,
    matrix_ptr,
    offsets_ptr,
    tile_ptr,
    num_rows,
    num_columns,
    num_segments,
    rows_a_tile,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    segment, end = _segment_of(row, offsets_ptr, tile_ptr, num_rows, num_segments, rows_a_tile, MAPPED)
    if row < end:
        values = _values(x_ptr, matrix_ptr, row, column, end, num_columns, ROWS, COLUMNS, ROTATED)
        if SHARED == 1:
            rows = row + tl.arange(0, ROWS)
            tl.atomic_max(amax_ptr + rows, tl.max(_magnitude(values), 1), mask=rows < end)
        elif SHARED == 2:
            columns = column + tl.arange(0, COLUMNS)
            place = amax_ptr + segment * num_columns + columns
            tl.atomic_max(place, tl.max(_magnitude(values), 0), mask=columns < num_columns)
        else:
            tl.atomic_max(amax_ptr + segment, tl.max(_magnitude(values)))


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _round_kernel(
    x_ptr,
    out_ptr,
    shared_ptr,
    seed_ptr,
    matrix_ptr,
    offsets_ptr,
    tile_ptr,
    num_rows,
    num_columns,
    num_segments,
    rows_a_tile,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    CHANCE: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    segment, end = _segment_of(row, offsets_ptr, tile_ptr, num_rows, num_segments, rows_a_tile, MAPPED)
    if row < end:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        values = _values(x_ptr, matrix_ptr, row, column, end, num_columns, ROWS, COLUMNS, ROTATED)
        draw = values
        if CHANCE:
            draw = tl.rand(tl.load(seed_ptr), rows[:, None] * num_columns + columns[None, :])
        if BLOCK_R == 0:
            if SHARED == 1:
                inverse = tl.load(shared_ptr + rows, mask=rows < end, other=0.0)[:, None]
            elif SHARED == 2:
                place = shared_ptr + segment * num_columns + columns
                inverse = tl.load(place, mask=columns < num_columns, other=0.0)[None, :]
            else:
                inverse = tl.load(shared_ptr + segment)
            rounded = _round(values * inverse, draw, MANTISSA, SMALLEST, LARGEST, CHANCE)
        else:
            blocks = values.reshape(ROWS // BLOCK_R, BLOCK_R, COLUMNS // BLOCK_C, BLOCK_C)
            amax = tl.max(tl.max(_magnitude(blocks), 3, keep_dims=True), 1, keep_dims=True)
            scale = tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST)
            if TWO_LEVEL:
                whole = tl.load(shared_ptr + segment)
                small = _round(tl.div_rn(scale, whole), 0.0, 3, -6, 448.0, False)
                scale = small * whole
            else:  # by the bits: a logarithm is not exact next to a power of two
                up = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
                scale = up.to(tl.float32, bitcast=True)
                small = scale
            inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.maximum(scale, 2.0**-100)))
            if CHANCE:
                draw = draw.reshape(ROWS // BLOCK_R, BLOCK_R, COLUMNS // BLOCK_C, BLOCK_C)
            codes = _round(blocks * inverse, draw, MANTISSA, SMALLEST, LARGEST, CHANCE)
            rounded = (codes * small).reshape(ROWS, COLUMNS)
        inside = (rows < end)[:, None] & (columns < num_columns)[None, :]
        place = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(place, rounded.to(tl.bfloat16), mask=inside)


def supports_scaling(scaling: Scaling | None) -> bool:
    """Whether operands can be rounded so, and bf16 holds them."""
    if scaling is None or scaling.hadamard not in (0, 4, 16):
        return False
    rows, contracted = scaling.block
    if scaling.scale != "two_level" and rows in (1, None) and contracted is None:
        return scaling.element.mantissa_bits < 8
    if scaling.scale == "float32" or rows is None or contracted is None or _ROWS % rows or _ROWS % contracted:
        return False
    bits_of_scale = 1 + E4M3.mantissa_bits if scaling.scale == "two_level" else 0
    return 1 + scaling.element.mantissa_bits + bits_of_scale <= 8


def round_operand(
    x_MC: torch.Tensor, scaling: Scaling, segments: Segments, *, transposed: bool, rotation: int = 0
) -> Rounded:
    """A contiguous matrix in bf16, by a scaling that is supported; ``rotation``: of so many contracted
    elements at a time."""
    num_columns = x_MC.shape[1]
    block = scaling.block[::-1] if transposed else scaling.block
    shared = _sharing(block, transposed=transposed)
    matrix = _rotations(rotation, transposed, x_MC.device) if rotation else x_MC
    rotated = 0 if not rotation else 2 if transposed else 1
    scales = None
    if shared or scaling.scale == "two_level":
        amax = _measure(x_MC, segments, matrix, shared or _SEGMENT, rotated)
        scales = _whole(amax, scaling) if scaling.scale == "two_level" else block_scales(amax, scaling)
    of_tiles = scales if scales is None or scaling.scale == "two_level" else inverse_of(scales)
    seed = torch.randint(2**31 - 1, (1,), device=x_MC.device) if scaling.stochastic else x_MC
    out_MC = torch.empty_like(x_MC)
    element = scaling.element
    _round_kernel[_grid(segments, num_columns, _ROWS)](
        x_MC,
        out_MC,
        x_MC if of_tiles is None else of_tiles,
        seed,
        matrix,
        *_arguments(x_MC, segments),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        MAPPED=segments.row_map is not None,
        SHARED=shared,
        ROTATED=rotated,
        BLOCK_R=0 if shared else block[0],
        BLOCK_C=0 if shared else block[1],
        TWO_LEVEL=scaling.scale == "two_level",
        CHANCE=scaling.stochastic,
        MANTISSA=element.mantissa_bits,
        SMALLEST=element.smallest_exponent,
        LARGEST=element.largest,
        num_warps=4,
    )
    return Rounded(out_MC, _factors(scales, segments, num_columns, transposed=transposed))


def _sharing(block: tuple[int | None, int | None], *, transposed: bool) -> int:
    """What has a scale together, of a block as it lies in memory; 0: less than a tile."""
    if None not in block:
        return 0
    return _SEGMENT if block == (None, None) else _SEGMENTS_COLUMN if transposed else _LINE


def _measure(
    x_MC: torch.Tensor, segments: Segments, matrix: torch.Tensor, shared: int, rotated: int
) -> torch.Tensor:
    """The largest magnitudes, ``[M]``, ``[S, C]`` or ``[S]``."""
    count, columns = segments.num_segments, x_MC.shape[1]
    shapes = {_LINE: (segments.num_rows,), _SEGMENTS_COLUMN: (count, columns), _SEGMENT: (count,)}
    amax = torch.zeros(shapes[shared], device=x_MC.device)
    rows = _ROWS if rotated == 2 else ALIGN
    _amax_kernel[_grid(segments, columns, rows)](
        x_MC,
        as_bits(amax),
        matrix,
        *_arguments(x_MC, segments),
        ROWS=rows,
        COLUMNS=_COLUMNS,
        MAPPED=segments.row_map is not None,
        SHARED=shared,
        ROTATED=rotated,
        num_warps=4,
    )
    return amax


def _grid(segments: Segments, num_columns: int, rows: int) -> tuple[int, int]:
    return cdiv(segments.num_rows, rows), cdiv(num_columns, _COLUMNS)


def _arguments(x_MC: torch.Tensor, segments: Segments) -> tuple[torch.Tensor | int, ...]:
    row_map = segments.row_map
    tables = (x_MC, x_MC) if row_map is None else (row_map.offsets, row_map.tile_expert)
    return *tables, segments.num_rows, x_MC.shape[1], segments.num_segments, segments.rows_a_tile


def _whole(amax_S: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """The upper level of two, as :func:`fsdmoe.precision.quantize.block_scales` has it."""
    scales = amax_S / torch.full_like(amax_S, scaling.element.largest)
    return scales.clamp(min=torch.finfo(torch.float32).tiny) / E4M3.largest


def _factors(
    scales: torch.Tensor | None, segments: Segments, num_columns: int, *, transposed: bool
) -> torch.Tensor | None:
    if scales is None or scales.shape != (segments.num_segments,):
        return scales
    if transposed:
        return scales[:, None].expand(-1, num_columns).contiguous()
    if segments.row_map is not None:  # whose entries past the last tile are undefined
        scales = scales[segments.row_map.tile_expert.clamp(0, segments.num_segments - 1)]
    return scales[:, None].expand(-1, segments.rows_a_tile).reshape(-1)


@functools.cache
def _rotations(size: int, transposed: bool, device: torch.device) -> torch.Tensor:
    """The matrix of as many rotations as a tile holds; bf16 has +-1/2 and +-1/4."""
    matrix = hadamard(size, torch.device("cpu"))
    many = torch.block_diag(*[matrix] * ((_ROWS if transposed else _COLUMNS) // size))
    return (many.mT if transposed else many).to(device, torch.bfloat16).contiguous()
