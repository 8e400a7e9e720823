"""Codes of a flat range of a weight: what a rank holds of it, whose blocks may lie on several ranks.

Two passes with a maximum over the ranks between them: the largest magnitudes of blocks, then codes. Equal to
the plain torch of ``fsdmoe.fsdp.block_scales``. A program takes 16 rows of 128 columns: of one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_scale import as_bits, as_bytes, raise_to, to_codes
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.precision.quantized_weight import TILE, WeightRange

_ROWS = tl.constexpr(16)
_NUM_WARPS = 4


@triton.jit
def _place(start, end, columns, rows, block_rows, blocks_across, per_matrix, BY_TILES: tl.constexpr):
    """Of a program's elements: where they are in the range, which are, and the number of their block."""
    first = start // columns // _ROWS * _ROWS + tl.program_id(1) * _ROWS
    row = first + tl.arange(0, _ROWS).to(tl.int64)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    element = row[:, None] * columns + column[None, :]
    inside = (column < columns)[None, :] & (element >= start) & (element < end)
    block = first // rows * per_matrix + first % rows // block_rows * blocks_across
    if BY_TILES:
        block += tl.program_id(0)
    return element - start, inside, block


@QuickLaunch
@triton.jit(do_not_specialize=["start", "end"])
def _measure_range_kernel(
    main_ptr, amax_ptr, start, end, columns, rows, block_rows, blocks_across, per_matrix,
    BY_TILES: tl.constexpr,
):  # fmt: skip
    at, inside, block = _place(start, end, columns, rows, block_rows, blocks_across, per_matrix, BY_TILES)
    values = tl.load(main_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # What is not a number counts as infinite: a maximum would pass it over.
    sizes = tl.where(values == values, tl.abs(values), float("inf"))
    raise_to(amax_ptr + block, tl.max(sizes))


@QuickLaunch
@triton.jit(do_not_specialize=["start", "end"])
def _encode_range_kernel(
    main_ptr, codes_ptr, inverse_ptr, start, end, columns, rows, block_rows, blocks_across, per_matrix,
    BY_TILES: tl.constexpr,
):  # fmt: skip
    at, inside, block = _place(start, end, columns, rows, block_rows, blocks_across, per_matrix, BY_TILES)
    values = tl.load(main_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(codes_ptr + at, to_codes(values * tl.load(inverse_ptr + block)), mask=inside)


def _arguments(held: WeightRange) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The grid, and where the range lies."""
    first, last = held.start // held.columns, (held.end - 1) // held.columns
    num_rows = last + 1 - first // _ROWS.value * _ROWS.value
    across = cdiv(held.columns, TILE) if held.by_tiles else 1
    block_rows = TILE if held.by_tiles else held.rows
    sizes = held.start, held.end, held.columns, held.rows, block_rows, across
    return (cdiv(held.columns, TILE), cdiv(num_rows, _ROWS.value)), (*sizes, held.rows // block_rows * across)


def measure_range_(main: torch.Tensor, held: WeightRange, amax: torch.Tensor) -> None:
    """Raise the largest magnitudes of a weight's blocks to those in its range."""
    grid, sizes = _arguments(held)
    _measure_range_kernel[grid](main, as_bits(amax), *sizes, BY_TILES=held.by_tiles, num_warps=_NUM_WARPS)


def encode_range_(main: torch.Tensor, held: WeightRange, inverse: torch.Tensor, codes: torch.Tensor) -> None:
    """The codes of a range, by the inverse scales of the weight's blocks."""
    grid, sizes = _arguments(held)
    _encode_range_kernel[grid](
        main, as_bytes(codes), inverse, *sizes, BY_TILES=held.by_tiles, num_warps=_NUM_WARPS
    )
