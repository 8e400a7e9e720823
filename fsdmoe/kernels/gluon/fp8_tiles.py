"""What the grouped GEMMs in fp8 share: which tile is whose, the copies into shared memory, the stores.

A tile is 128 x 256 over steps of 128: the producer fills a ring of STAGES buffers by bulk copies (TMA), and
warpgroup HALF owns rows 64 HALF .. 64 HALF + 63 as two accumulators of 64 x 128. In ``GATE_UP`` the two are
matching columns of gate and up.

    ready[i]   the producer's copies into stage i have landed          (1 arrival, by the copies)
    empty[i]   both warpgroups have read stage i                       (2 arrivals)

A low-rank term (``narrow[m] @ factor[e]^T`` in bf16, of rank Q) is TERM more steps of 64 ranks: 64 numbers in
bf16 take the place of 128 in fp8, and copies fill what lies past Q with zeros.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fsdmoe.kernels.gluon.compat import as_bf16, as_words, tma_load, tma_store

# What a kernel computes, and where an output tile goes.
PROJECT, GATE_UP, WEIGHT_GRAD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
BULK, OVERWRITE, ADD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# What becomes of the pre-activation in GATE_UP; other kinds store VALUES.
NOTHING, VALUES, CODES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)

ACCUMULATOR = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)


@gluon.jit
def count_tiles(offsets_ptr, m, n, num_experts, KIND: gl.constexpr):
    """-> row tiles of an expert (weight gradients), column tiles, all tiles"""
    tiles_m = gl.cdiv(m, 128)
    tiles_n = gl.cdiv(n, 128) if KIND == GATE_UP else gl.cdiv(n, 256)
    if KIND == WEIGHT_GRAD:
        total = num_experts * tiles_m * tiles_n
    else:
        total = gl.load(offsets_ptr + num_experts) // 128 * tiles_n
    return tiles_m, tiles_n, total


@gluon.jit
def locate(
    tile, offsets_ptr, tile_expert_ptr, tiles_m, tiles_n, num_panels, KIND: gl.constexpr, GROUP: gl.constexpr
):
    """-> expert, row tile (of all rows, or of the expert's gradient), column tile, first panel, panels

    Rows run fastest inside groups of GROUP row tiles: programs that run together share columns' operands."""
    if KIND == WEIGHT_GRAD:
        expert = tile // (tiles_m * tiles_n)
        local = tile % (tiles_m * tiles_n)
        start = gl.load(offsets_ptr + expert) // 128
        # An expert for which a broken promise of max_rows left no rows starts behind the last panel. It takes
        # that one, since every tile has a step; the output is NaN then, and no gradient counts.
        count = gl.maximum(gl.load(offsets_ptr + expert + 1) // 128 - start, 1)
        start = gl.minimum(start, num_panels - 1)
        base = 0
    else:
        expert = gl.load(tile_expert_ptr + tile // tiles_n)
        start = gl.load(offsets_ptr + expert) // 128
        count = gl.load(offsets_ptr + expert + 1) // 128 - start
        tiles_m = count
        local = tile - start * tiles_n
        base = start
    first = local // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    rest = local - first * tiles_n
    return expert, base + first + rest % height, rest // height, start, count


@gluon.jit
def next_stage(index, phase, STAGES: gl.constexpr):
    index += 1
    wrap = index == STAGES
    return gl.where(wrap, 0, index), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def gap_of(tile_n, n, KIND: gl.constexpr):
    """Columns from a tile's first accumulator to its second. A last tile of 128 columns computes them twice:
    what lies behind them is another expert's, or was never written, and a NaN there would spread."""
    if KIND == GATE_UP:
        return n
    else:
        return gl.where(tile_n * 256 + 128 < n, 128, 0)


@gluon.jit
def producer(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, offsets_ptr, tile_expert_ptr,
    m, n, steps, num_panels, num_experts, num_programs,
    narrow_desc, factor_desc,
    KIND: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, TERM: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n, num_tiles = count_tiles(offsets_ptr, m, n, num_experts, KIND)
    index = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), num_tiles, num_programs):
        expert, tile_m, tile_n, start, count = locate(
            tile, offsets_ptr, tile_expert_ptr, tiles_m, tiles_n, num_panels, KIND, GROUP
        )
        gap = gap_of(tile_n, n, KIND)
        if KIND == WEIGHT_GRAD:
            num_steps = count
        else:
            num_steps = steps
        for step in range(num_steps):
            mbarrier.wait(empty.index(index), phase)
            landed = ready.index(index)
            mbarrier.expect(landed, 3 * 128 * 128)
            if KIND == WEIGHT_GRAD:
                a_row = (start + step) * m + tile_m * 128
                b_row = (start + step) * n + tile_n * 256
                column = 0
            elif KIND == GATE_UP:
                a_row = tile_m * 128
                b_row = expert * (2 * n) + tile_n * 128
                column = step * 128
            else:
                a_row = tile_m * 128
                b_row = expert * n + tile_n * 256
                column = step * 128
            b = b_bufs.index(index)
            tma_load(a_desc, [a_row, column], landed, a_bufs.index(index))
            tma_load(b_desc, [b_row, column], landed, b.slice(0, 128))
            tma_load(b_desc, [b_row + gap, column], landed, b.slice(128, 128))
            index, phase = next_stage(index, phase, STAGES)
        for piece in gl.static_range(TERM):
            mbarrier.wait(empty.index(index), phase)
            landed = ready.index(index)
            mbarrier.expect(landed, 3 * 128 * 128)
            if KIND == GATE_UP:
                factor_row = expert * (2 * n) + tile_n * 128
            else:
                factor_row = expert * n + tile_n * 256
            factors = as_bf16(b_bufs.index(index), 256)
            tma_load(narrow_desc, [tile_m * 128, piece * 64], landed, as_bf16(a_bufs.index(index), 128))
            tma_load(factor_desc, [factor_row, piece * 64], landed, factors.slice(0, 128))
            tma_load(factor_desc, [factor_row + gap, piece * 64], landed, factors.slice(128, 128))
            index, phase = next_stage(index, phase, STAGES)


@gluon.jit
def store_bulk(desc, buffer, row, column, value):
    tma.store_wait(0)  # the buffer's last store has been read out
    buffer.store(value)
    fence_async_shared()
    tma_store(desc, [row, column], buffer)


@gluon.jit
def store_words(desc, buffer, row, column, words):
    """:func:`store_bulk` of 64 x 128 numbers in bf16 that are held as words."""
    tma.store_wait(0)
    as_words(buffer).store(words)
    fence_async_shared()
    tma_store(desc, [row, column], buffer)


@gluon.jit
def store_direct(out_ptr, row, column, value, n, STORE: gl.constexpr):
    """From registers: each group of four threads fills a memory sector of a row. A buffer for 64 x 128 in
    fp32 would cost a stage of the ring."""
    n = n // 128 * 128  # as it is: the compiler learns that rows are aligned, else it stores word by word
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, ACCUMULATOR))
    columns = column + gl.arange(0, 128, layout=gl.SliceLayout(0, ACCUMULATOR))
    at = out_ptr + rows.to(gl.int64)[:, None] * n + columns[None, :]
    inside = (columns < n)[None, :]
    if STORE == ADD:
        value += gl.load(at, mask=inside, other=0.0).to(gl.float32)
    gl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)
