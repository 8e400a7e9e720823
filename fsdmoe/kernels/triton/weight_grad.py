"""Weight gradients of the grouped projections, written straight into the gradient's own memory.

    out[e] (+)= left[rows of e]^T @ right[rows of e]

The result may be fp32 or bf16 and is overwritten or added to, so a gradient buffer of the sharding engine
is filled without a temporary and without a cast. Each expert's padding rows are zero in both operands, so
the last block of rows needs no mask, and an expert without rows gets zeros. As in ``grouped_gemm``,
programs walk tiles in a flattened loop, so that the next tile's loads start under the stores of this one.

A tile takes as long as its expert has rows, so which program gets which decides when the last one is done.
The first tile of every program is one of the busiest experts, in descending order; all later rounds run in
ascending order, so that whoever began with the longest tile goes on with shorter ones. Every element is
summed by one program in the order of rows: the result does not depend on who computes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, describe, next_power_of_2, num_programs
from fsdmoe.kernels.triton.row_map import GatheredRows, RowMap
from fsdmoe.kernels.triton.tile_store import store_tile
from fsdmoe.kernels.triton.tiles import Tile


@triton.jit
def _nth_busiest(order_ptr, nth, first_expert, num_experts, NUM_ALL: tl.constexpr, ALL: tl.constexpr):
    """Of the experts from ``first_expert`` on."""
    slots = tl.arange(0, ALL)
    order = tl.load(order_ptr + slots, mask=slots < NUM_ALL, other=-1)
    inside = (order >= first_expert) & (order < first_expert + num_experts)
    is_wanted = inside & (tl.cumsum(inside.to(tl.int32), 0) == nth + 1)
    return tl.sum(tl.where(is_wanted, order, 0), 0)


@QuickLaunch
@triton.jit(do_not_specialize=["first_expert", "num_experts", "num_programs"])
def _weight_grad_kernel(
    left_desc,
    right_ptr,
    right_desc,
    out_desc,
    source_ptr,
    offsets_ptr,
    counts_ptr,
    order_ptr,
    m,
    n,
    first_expert,
    num_experts,
    num_programs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    NUM_ALL: tl.constexpr,
    ALL: tl.constexpr,
):
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    num_tiles = num_experts * tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), num_tiles, num_programs, flatten=True):
        before = tile // num_programs * num_programs
        size = tl.minimum(num_tiles - before, num_programs)
        at = tl.where(before == 0, tile, 2 * before + size - 1 - tile)
        nth = at // (tiles_m * tiles_n)
        local = at % (tiles_m * tiles_n)
        if ALL > 0:
            expert = _nth_busiest(order_ptr, nth, first_expert, num_experts, NUM_ALL, ALL)
        else:
            expert = tl.load(order_ptr + nth)
        first = local // (GROUP_M * tiles_n) * GROUP_M
        height = tl.minimum(tiles_m - first, GROUP_M)
        rest = local - first * tiles_n
        tile_m = first + rest % height
        tile_n = rest // height
        start = tl.load(offsets_ptr + expert)
        num_steps = tl.maximum(tl.cdiv(tl.load(counts_ptr + expert), BLOCK_K), 1)
        tl.assume(num_steps > 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, num_steps):
            row = start + step * BLOCK_K
            left = left_desc.load([row, tile_m * BLOCK_M])
            if GATHER:
                places = row + tl.arange(0, BLOCK_K)
                # Where rows were more than promised, counts reach past the last place.
                is_place = places < tl.load(offsets_ptr + expert + 1)
                source = tl.load(source_ptr + places, mask=is_place, other=-1)
                columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                right_ptrs = right_ptr + (source // TOP_K).to(tl.int64)[:, None] * n + columns[None, :]
                right = tl.load(right_ptrs, mask=(source >= 0)[:, None] & (columns < n)[None, :], other=0.0)
            else:
                right = right_desc.load([row, tile_n * BLOCK_N])
            acc = tl.dot(left.T, right, acc)
        place = expert - first_expert
        store_tile(out_desc, place, tile_m * BLOCK_M, tile_n * BLOCK_N, acc, BLOCK_M, BLOCK_N, PARTS, ADD)


@QuickLaunch
@triton.jit
def _bias_grad_kernel(
    left_ptr, out_ptr, offsets_ptr, counts_ptr, m, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    expert = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets_ptr + expert)
    count = tl.load(counts_ptr + expert)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (columns < m)[None, :]
        at = (start + rows).to(tl.int64)[:, None] * m + columns[None, :]
        acc += tl.load(left_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + expert.to(tl.int64) * m + columns, tl.sum(acc, 0), mask=columns < m)


def bias_grad(left_MA: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """The sum of each expert's rows, ``[E, A]`` in fp32; without atomics, so the same every time."""
    width, columns = left_MA.shape[1], 128
    out_EA = torch.empty(row_map.num_experts, width, device=left_MA.device, dtype=torch.float32)
    _bias_grad_kernel[(row_map.num_experts, cdiv(width, columns))](
        left_MA, out_EA, row_map.offsets, row_map.counts_E, width, ROWS=32, COLUMNS=columns, num_warps=4
    )
    return out_EA


def weight_grad(
    left_MA: torch.Tensor,
    right: torch.Tensor | GatheredRows,
    row_map: RowMap,
    out_EAB: torch.Tensor,
    *,
    accumulate: bool,
    tile: Tile,
    first_expert: int = 0,
) -> None:
    """Write or add ``left^T @ right`` per expert into ``out`` (contiguous, fp32 or bf16); ``right`` are rows
    ``[M, B]``. ``out`` is that of the experts from ``first_expert`` on."""
    num_experts, m, n = out_EAB.shape
    gathered = isinstance(right, GatheredRows)
    rows = right.x_RD if isinstance(right, GatheredRows) else right
    tiles_m, tiles_n = cdiv(m, tile.m), cdiv(n, tile.n)
    programs = tile.per_sm * num_programs(left_MA.device, tile.spare_sms)
    programs = min(programs, num_experts * tiles_m * tiles_n)
    # Only a range of experts has to be looked for in the order of all.
    num_all = row_map.num_experts if num_experts < row_map.num_experts else 0
    _weight_grad_kernel[(programs,)](
        describe(left_MA, (tile.k, tile.m)),
        rows,
        describe(rows, (tile.k, tile.n)),
        describe(out_EAB, (1, tile.m, tile.n // tile.parts)),
        row_map.source_M,
        row_map.offsets,
        row_map.counts_E,
        row_map.order_E,
        m,
        n,
        first_expert,
        num_experts,
        programs,
        TOP_K=row_map.top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        GATHER=gathered,
        PARTS=tile.parts,
        ADD=accumulate,
        NUM_ALL=num_all,
        ALL=next_power_of_2(num_all) if num_all else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
