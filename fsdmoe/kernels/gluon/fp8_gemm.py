"""Grouped GEMMs in fp8 for Hopper, warp-specialised: one warp copies, two warpgroups multiply.

    project      out[m] = a[m] @ w[e]^T                a [M, K], w [E, N, K]
    gate_up      the same with SwiGLU x weight: the pre-activation in bf16 or fp8, the activation in fp8
    weight_grad  out[e] = a[:, rows of e] @ b[:, rows of e]^T, operands as token panels [M/128, C, 128]

The first two may add a low-rank term in bf16, ``narrow[m] @ factor[e]^T``, to their sums in fp32.
Tiles, copies and stores are ``fp8_tiles``'s. The matrix units add up fp8 products in fewer bits than fp32
has, so each step's product is *promoted*: multiplied by its scales and added in fp32 registers.

Orders that matter, all of them paid for on Triton 3.6:

* The two products of a step are waited for one after the other. With both in flight and different waits,
  ptxas serialises every matrix instruction, and says nothing.
* Scales are fetched a step ahead, over the edge of a tile too: in the loop they would be waited for.
* A tile's end is under the next one's first step: its results are stored and the tile after it is found while
  the matrix units work. Done in between, that cost as much as 1.7 steps.
* A consumer gets fewer registers than there are (216): with 232 ptxas keeps both products and spills.
* A value that a loop carries and uses as an inner loop's bound alone is dropped (a deadlock): see ``count``.

Sizes: M sorted rows, K contracted, N columns, E experts; ``m``, ``n`` rows and columns of an expert's output.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fsdmoe.kernels.gluon.compat import as_bf16, as_fp8
from fsdmoe.kernels.gluon.fp8_math import (
    bf16_words,
    block_scale,
    reciprocal,
    rounded_to_bf16,
    sigmoid,
    to_bf16,
)
from fsdmoe.kernels.gluon.fp8_tiles import (
    ACCUMULATOR,
    BULK,
    CODES,
    GATE_UP,
    VALUES,
    WEIGHT_GRAD,
    count_tiles,
    gap_of,
    locate,
    next_stage,
    producer,
    store_bulk,
    store_direct,
    store_words,
)
from fsdmoe.kernels.triton.launch import QuickLaunch

_NOWHERE = gl.constexpr(1 << 30)
# As ``ACCUMULATOR`` lies, for products in bf16, which are half as deep.
_OF_BF16 = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)


@gluon.jit
def _start_first(a_bufs, b_bufs, ready, index, phase, HALF: gl.constexpr):
    """The product with a step's first 128 columns, under way."""
    mbarrier.wait(ready.index(index), phase)
    a = a_bufs.index(index).slice(HALF * 64, 64)
    zeros = gl.zeros([64, 128], gl.float32, layout=ACCUMULATOR)
    columns = b_bufs.index(index).slice(0, 128).permute((1, 0))
    return warpgroup_mma(a, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_second(a_bufs, b_bufs, index, HALF: gl.constexpr):
    """That with the others."""
    a = a_bufs.index(index).slice(HALF * 64, 64)
    zeros = gl.zeros([64, 128], gl.float32, layout=ACCUMULATOR)
    columns = b_bufs.index(index).slice(128, 128).permute((1, 0))
    return warpgroup_mma(a, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _end_second(second, empty, index):
    second = warpgroup_mma_wait(0, deps=(second,))
    mbarrier.arrive(empty.index(index), count=1)  # before the sum: the copies of a later step may start
    return second


@gluon.jit
def _term_product(a, columns):
    # Not into the sums, which would not be lost: but ptxas then spills as many registers as a product has.
    zeros = gl.zeros([64, 128], gl.float32, layout=_OF_BF16)
    found = warpgroup_mma(a, columns.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return gl.convert_layout(warpgroup_mma_wait(0, deps=(found,)), ACCUMULATOR)


@gluon.jit
def _plus_term(sums0, sums1, a_bufs, b_bufs, ready, empty, index, phase, HALF: gl.constexpr):
    """A step of a low-rank term, added to the sums; see ``fp8_tiles``."""
    mbarrier.wait(ready.index(index), phase)
    a = as_bf16(a_bufs.index(index), 128).slice(HALF * 64, 64)
    factors = as_bf16(b_bufs.index(index), 256)
    sums0 += _term_product(a, factors.slice(0, 128))
    sums1 += _term_product(a, factors.slice(128, 128))
    mbarrier.arrive(empty.index(index), count=1)
    return sums0, sums1


@gluon.jit
def _scales(
    a_scales_ptr, b_scales_ptr, expert, tile_m, tile_n, start, step, lanes, m, n, steps, capacity,
    KIND: gl.constexpr,
):  # fmt: skip
    """Of a step: each row's, and those of the two column blocks (1 in weight gradients: theirs are the same
    for all steps, and wait for the end)."""
    if KIND == WEIGHT_GRAD:
        rows = gl.load(a_scales_ptr + (start + step) * m + tile_m * 128 + lanes)
        one = gl.to_tensor(1.0)
        return rows, one, one
    else:
        rows = gl.load(a_scales_ptr + step * capacity + tile_m * 128 + lanes)
        if KIND == GATE_UP:
            at = (expert * (2 * n // 128) + tile_n) * steps + step
        else:
            at = (expert * (n // 128) + tile_n * 2) * steps + step
        gap = gap_of(tile_n, n, KIND) // 128 * steps
        return rows, gl.load(b_scales_ptr + at), gl.load(b_scales_ptr + at + gap)


@gluon.jit
def _scales_ahead(
    a_scales_ptr, b_scales_ptr, inside, step, expert, tile_m, tile_n, start, next_expert, next_m, next_n,
    next_start, lanes, m, n, steps, capacity, KIND: gl.constexpr,
):  # fmt: skip
    """Of a step that is ``inside`` of this tile, or else of the next tile's first."""
    return _scales(
        a_scales_ptr, b_scales_ptr, gl.where(inside, expert, next_expert), gl.where(inside, tile_m, next_m),
        gl.where(inside, tile_n, next_n), gl.where(inside, start, next_start), gl.where(inside, step, 0),
        lanes, m, n, steps, capacity, KIND,
    )  # fmt: skip


@gluon.jit
def _store_codes(desc, buffer, scales_ptr, values, lanes, row, column, POWER_OF_TWO: gl.constexpr):
    """64 x 128 numbers with a scale a row."""
    scale = block_scale(gl.max(gl.abs(values), axis=1), POWER_OF_TWO)
    gl.store(scales_ptr + lanes, scale)
    codes = (values * reciprocal(scale)[:, None]).to(gl.float8e4nv)
    store_bulk(desc, as_fp8(buffer, desc), row, column, codes)


@gluon.jit
def _finish_gate_up(
    out_desc, act_desc, out_ptr, buffer, act_scales_ptr, gate, up, weight, lanes, row, tile_m, tile_n,
    capacity, KEEP: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """SwiGLU x weight of what bf16 holds of the pre-activation: backward then finds the same activation. All
    but the linear half, which is returned, is stored; of CODES, whose scales ``[N/128, 2M]`` begin at
    ``out_ptr``, that half too."""
    gate, up = rounded_to_bf16(gate), rounded_to_bf16(up)
    column = tile_n * 128
    if KEEP == VALUES:
        store_bulk(out_desc, buffer, row, column, to_bf16(gate))
    elif KEEP == CODES:
        gates_at = out_ptr + tile_n * (2 * capacity) + tile_m * 128
        _store_codes(out_desc, buffer, gates_at, gate, lanes, row, column, POWER_OF_TWO)
        _store_codes(out_desc, buffer, gates_at + capacity, up, lanes, row + capacity, column, POWER_OF_TWO)
    act = rounded_to_bf16(gate * sigmoid(gate) * up * weight[:, None])
    act_scales_ptr += tile_n * capacity + tile_m * 128
    _store_codes(act_desc, buffer, act_scales_ptr, act, lanes, row, column, POWER_OF_TWO)
    return bf16_words(up)


@gluon.jit
def _factors(b_scales_ptr, weights_ptr, source_ptr, expert, tile_m, tile_n, n, num_experts, lanes,
    KIND: gl.constexpr,
):  # fmt: skip
    """What a tile's end multiplies by: the weights of the rows, or the scales of the two column blocks."""
    if KIND == GATE_UP:
        source = gl.load(source_ptr + tile_m * 128 + lanes)
        weight = gl.load(weights_ptr + source, mask=source >= 0, other=0.0).to(gl.float32)
        return weight, weight
    elif KIND == WEIGHT_GRAD:
        at = expert * (n // 128) + tile_n * 2
        return gl.load(b_scales_ptr + at), gl.load(b_scales_ptr + at + gap_of(tile_n, n, KIND) // 128)
    else:
        # Unknown to the compiler: without a product of its own, a tile's end makes ptxas spill 30 registers.
        one = gl.where(num_experts > 0, 1.0, 0.0)
        return one, one


@gluon.jit
def _consumer(
    out_desc, act_desc, out_ptr, a_bufs, b_bufs, c_bufs, ready, empty, a_scales_ptr, b_scales_ptr,
    weights_ptr, source_ptr, act_scales_ptr, offsets_ptr, tile_expert_ptr,
    m, n, steps, capacity, num_experts, num_programs,
    HALF: gl.constexpr, KIND: gl.constexpr, STORE: gl.constexpr, KEEP: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, TERM: gl.constexpr,
):  # fmt: skip
    lanes = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACCUMULATOR))
    num_panels = capacity // 128
    tiles_m, tiles_n, num_tiles = count_tiles(offsets_ptr, m, n, num_experts, KIND)
    index = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    buffer = c_bufs.index(HALF)
    # A program without a tile (fewer tiles than programs) looks at the last one.
    expert, tile_m, tile_n, start, count = locate(
        gl.minimum(gl.program_id(0), num_tiles - 1),
        offsets_ptr, tile_expert_ptr, tiles_m, tiles_n, num_panels, KIND, GROUP,
    )  # fmt: skip
    rows, left, right = _scales(
        a_scales_ptr, b_scales_ptr, expert, tile_m, tile_n, start, 0, lanes, m, n, steps, capacity, KIND
    )
    # What the last tile left to be stored, and where. Of the first there is none: behind all rows, where a
    # bulk copy drops it.
    held_row = gl.to_tensor(_NOWHERE)
    held_column = gl.to_tensor(0)
    held0 = bf16_words(gl.zeros([64, 128], gl.float32, layout=ACCUMULATOR))
    held1 = held0
    for tile in range(gl.program_id(0), num_tiles, num_programs):
        if KIND == WEIGHT_GRAD:
            num_steps = count
        else:
            num_steps = steps
        # The first step apart: its products are the sums, and under them the last tile's results are stored
        # and it is found where the next tile lies.
        scale0 = rows * left
        scale1 = rows * right
        first = _start_first(a_bufs, b_bufs, ready, index, phase, HALF)
        if KEEP == VALUES and STORE == BULK:
            store_words(out_desc, buffer, held_row, held_column, held0)
        next_expert, next_m, next_n, next_start, next_count = locate(
            gl.minimum(tile + num_programs, num_tiles - 1),
            offsets_ptr, tile_expert_ptr, tiles_m, tiles_n, num_panels, KIND, GROUP,
        )  # fmt: skip
        rows, left, right = _scales_ahead(
            a_scales_ptr, b_scales_ptr, num_steps > 1, 1, expert, tile_m, tile_n, start,
            next_expert, next_m, next_n, next_start, lanes, m, n, steps, capacity, KIND,
        )  # fmt: skip
        first = warpgroup_mma_wait(0, deps=(first,))
        sums0 = first * scale0[:, None]
        second = _start_second(a_bufs, b_bufs, index, HALF)
        if KIND != GATE_UP and STORE == BULK:
            store_words(out_desc, buffer, held_row, held_column + 128, held1)
        factor0, factor1 = _factors(
            b_scales_ptr, weights_ptr, source_ptr, expert, tile_m, tile_n, n, num_experts, lanes, KIND
        )
        sums1 = _end_second(second, empty, index) * scale1[:, None]
        index, phase = next_stage(index, phase, STAGES)
        for step in range(1, num_steps):
            inside = step + 1 < num_steps
            scale0 = rows * left
            scale1 = rows * right
            rows, left, right = _scales_ahead(
                a_scales_ptr, b_scales_ptr, inside, step + 1, expert, tile_m, tile_n, start,
                next_expert, next_m, next_n, next_start, lanes, m, n, steps, capacity, KIND,
            )  # fmt: skip
            first = _start_first(a_bufs, b_bufs, ready, index, phase, HALF)
            first = warpgroup_mma_wait(0, deps=(first,))
            sums0 += first * scale0[:, None]
            second = _start_second(a_bufs, b_bufs, index, HALF)
            sums1 += _end_second(second, empty, index) * scale1[:, None]
            index, phase = next_stage(index, phase, STAGES)
        for _piece in gl.static_range(TERM):
            sums0, sums1 = _plus_term(sums0, sums1, a_bufs, b_bufs, ready, empty, index, phase, HALF)
            index, phase = next_stage(index, phase, STAGES)
        row = tile_m * 128 + HALF * 64
        if KIND == GATE_UP:
            held0 = _finish_gate_up(
                out_desc, act_desc, out_ptr, buffer, act_scales_ptr, sums0, sums1, factor0, lanes, row,
                tile_m, tile_n, capacity, KEEP, POWER_OF_TWO,
            )  # fmt: skip
            row += capacity
            held_column = tile_n * 128
        else:
            if KIND == WEIGHT_GRAD:
                # + 0: with no use but as a loop's bound, the carried count would be the first tile's for all.
                row += expert * m + gl.minimum(count, 0)
            sums0 *= factor0
            sums1 *= factor1
            held_column = tile_n * 256
            if STORE == BULK:
                held0, held1 = bf16_words(sums0), bf16_words(sums1)
            else:
                store_direct(out_ptr, row, held_column, sums0, n, STORE)
                store_direct(out_ptr, row, held_column + 128, sums1, n, STORE)
        held_row = row
        expert, tile_m, tile_n, start, count = next_expert, next_m, next_n, next_start, next_count
    if KEEP == VALUES and STORE == BULK:
        store_words(out_desc, buffer, held_row, held_column, held0)
        if KIND != GATE_UP:
            store_words(out_desc, buffer, held_row, held_column + 128, held1)
    tma.store_wait(0)


@QuickLaunch
@gluon.jit(do_not_specialize=["m", "n", "steps", "capacity", "num_experts", "num_programs"])
def fp8_gemm_kernel(
    a_desc, b_desc, out_desc, act_desc, out_ptr, a_scales_ptr, b_scales_ptr, weights_ptr, source_ptr,
    act_scales_ptr, offsets_ptr, tile_expert_ptr, m, n, steps, capacity, num_experts, num_programs,
    narrow_desc, factor_desc,
    KIND: gl.constexpr, STORE: gl.constexpr, KEEP: gl.constexpr, POWER_OF_TWO: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, TERM: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, 128], b_desc.layout)
    c_bufs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, 128], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_consumer, (
                out_desc, act_desc, out_ptr, a_bufs, b_bufs, c_bufs, ready, empty, a_scales_ptr, b_scales_ptr,
                weights_ptr, source_ptr, act_scales_ptr, offsets_ptr, tile_expert_ptr,
                m, n, steps, capacity, num_experts, num_programs,
                0, KIND, STORE, KEEP, POWER_OF_TWO, GROUP, STAGES, TERM,
            )),
            (_consumer, (
                out_desc, act_desc, out_ptr, a_bufs, b_bufs, c_bufs, ready, empty, a_scales_ptr, b_scales_ptr,
                weights_ptr, source_ptr, act_scales_ptr, offsets_ptr, tile_expert_ptr,
                m, n, steps, capacity, num_experts, num_programs,
                1, KIND, STORE, KEEP, POWER_OF_TWO, GROUP, STAGES, TERM,
            )),
            (producer, (
                a_desc, b_desc, a_bufs, b_bufs, ready, empty, offsets_ptr, tile_expert_ptr,
                m, n, steps, capacity // 128, num_experts, num_programs, narrow_desc, factor_desc,
                KIND, GROUP, STAGES, TERM,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
