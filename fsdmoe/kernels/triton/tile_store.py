"""Storing an accumulator tile through TMA in column parts.

A whole tile of results would need a staging buffer as large as a pipeline stage or more (128 × 256 in fp32:
128 KiB); stored part by part, the parts reuse one small buffer and the memory serves deeper pipelines. Parts
are cut between the columns that each thread already holds, so cutting costs no data movement.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_part(
    out_desc, layer, row, column, part, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr
):
    if ADD:
        part += out_desc.load([layer, row, column]).reshape(ROWS, COLUMNS).to(tl.float32)
    out_desc.store([layer, row, column], part.to(out_desc.dtype).reshape(1, ROWS, COLUMNS))


@triton.jit
def store_tile(
    out_desc,
    layer,
    row,
    column,
    tile,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write ``tile`` at ``[layer, row, column]`` in 1, 2 or 4 parts, or add it there in fp32."""
    tl.static_assert(PARTS <= 4)
    if PARTS == 1:
        _store_part(out_desc, layer, row, column, tile, ROWS, COLUMNS, ADD)
    else:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tile.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        if PARTS == 2:
            _store_part(out_desc, layer, row, column, left, ROWS, HALF, ADD)
            _store_part(out_desc, layer, row, column + HALF, right, ROWS, HALF, ADD)
        else:
            QUARTER: tl.constexpr = COLUMNS // 4
            a, b = tl.split(left.reshape(ROWS, 2, QUARTER).permute(0, 2, 1))
            _store_part(out_desc, layer, row, column, a, ROWS, QUARTER, ADD)
            _store_part(out_desc, layer, row, column + QUARTER, b, ROWS, QUARTER, ADD)
            c, d = tl.split(right.reshape(ROWS, 2, QUARTER).permute(0, 2, 1))
            _store_part(out_desc, layer, row, column + 2 * QUARTER, c, ROWS, QUARTER, ADD)
            _store_part(out_desc, layer, row, column + 3 * QUARTER, d, ROWS, QUARTER, ADD)
