"""Grouped GEMMs in fp8 for Hopper that add up in the matrix unit: scales wait for the end of a tile.

    project      out[m] = a[m] @ w[e]^T                a [M, K], w [E, N, K]
    gate_up      the same with SwiGLU x weight: the pre-activation in bf16, the activation in fp8
    weight_grad  out[e] = a[:, rows of e] @ b[:, rows of e]^T, operands as token panels [M/128, C, 128]

What ``fp8_gemm`` does with a scale for every 128 contracted elements, with one for all of them: a row's or an
expert's. Tiles, copies and stores are ``fp8_tiles``'s. The two products of a step stay in flight while those
of the next are started, and a stage is given back a step later, once it has been read.

Sizes: M sorted rows, K contracted, N columns, E experts; ``m``, ``n`` rows and columns of an expert's output.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fsdmoe.kernels.gluon.compat import as_fp8
from fsdmoe.kernels.gluon.fp8_math import reciprocal, rounded_to_bf16, sigmoid
from fsdmoe.kernels.gluon.fp8_tiles import (
    ACCUMULATOR,
    BULK,
    GATE_UP,
    WEIGHT_GRAD,
    count_tiles,
    locate,
    next_stage,
    producer,
    store_bulk,
    store_direct,
)
from fsdmoe.kernels.triton.launch import QuickLaunch


@gluon.jit
def _before(index, STAGES: gl.constexpr):
    """Computed, not carried: Triton takes a value that starts as another carried one's for the same in every
    turn, and the stage that is given back would always be the first (a deadlock)."""
    return gl.where(index == 0, STAGES - 1, index - 1)


@gluon.jit
def _multiply(
    a_bufs, b_bufs, ready, empty, index, phase, num_steps, HALF: gl.constexpr, STAGES: gl.constexpr
):
    """All steps of a tile."""
    sums0 = gl.zeros([64, 128], gl.float32, layout=ACCUMULATOR)
    sums1 = gl.zeros([64, 128], gl.float32, layout=ACCUMULATOR)
    for step in range(num_steps):
        mbarrier.wait(ready.index(index), phase)
        a = a_bufs.index(index).slice(HALF * 64, 64)
        b = b_bufs.index(index)
        sums0 = warpgroup_mma(a, b.slice(0, 128).permute((1, 0)), sums0, is_async=True)
        sums1 = warpgroup_mma(a, b.slice(128, 128).permute((1, 0)), sums1, is_async=True)
        # This step's two may be under way: the one before is done, and its stage has been read.
        sums0, sums1 = warpgroup_mma_wait(2, deps=(sums0, sums1))
        mbarrier.arrive(empty.index(_before(index, STAGES)), count=1, pred=step > 0)
        index, phase = next_stage(index, phase, STAGES)
    sums0, sums1 = warpgroup_mma_wait(0, deps=(sums0, sums1))
    # An expert without rows has no step, and no stage to give back.
    mbarrier.arrive(empty.index(_before(index, STAGES)), count=1, pred=num_steps > 0)
    return sums0, sums1, index, phase


@gluon.jit
def _finish_gate_up(
    out_desc, act_desc, buffer, weights_ptr, source_ptr, peaks_ptr, gate, up, inverse, lanes, row, tile_m,
    tile_n, capacity, KEEP: gl.constexpr,
):  # fmt: skip
    """SwiGLU x weight of what bf16 holds of the pre-activation: backward then finds the same activation. Its
    scale is given; what later ones follow from is written down."""
    if KEEP:
        store_bulk(out_desc, buffer, row, tile_n * 128, gate.to(gl.bfloat16))
        store_bulk(out_desc, buffer, capacity + row, tile_n * 128, up.to(gl.bfloat16))
    source = gl.load(source_ptr + tile_m * 128 + lanes)
    weight = gl.load(weights_ptr + source, mask=source >= 0, other=0.0).to(gl.float32)
    gate = rounded_to_bf16(gate)
    act = rounded_to_bf16(gate * sigmoid(gate) * rounded_to_bf16(up) * weight[:, None])
    gl.store(peaks_ptr + tile_n * capacity + tile_m * 128 + lanes, gl.max(gl.abs(act), axis=1))
    store_bulk(act_desc, as_fp8(buffer, act_desc), row, tile_n * 128, (act * inverse).to(gl.float8e4nv))


@gluon.jit
def _consumer(
    out_desc, act_desc, out_ptr, a_bufs, b_bufs, c_bufs, ready, empty, a_scales_ptr, b_scales_ptr,
    weights_ptr, source_ptr, act_scales_ptr, peaks_ptr, offsets_ptr, tile_expert_ptr,
    m, n, steps, capacity, num_experts, num_programs,
    HALF: gl.constexpr, KIND: gl.constexpr, STORE: gl.constexpr, KEEP: gl.constexpr,
    BY_ROW: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    lanes = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACCUMULATOR))
    num_panels = capacity // 128
    tiles_m, tiles_n, num_tiles = count_tiles(offsets_ptr, m, n, num_experts, KIND)
    index = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    buffer = c_bufs.index(HALF)
    # A program without a tile (fewer tiles than programs) looks at the last one.
    expert, tile_m, tile_n, _, count = locate(
        gl.minimum(gl.program_id(0), num_tiles - 1),
        offsets_ptr, tile_expert_ptr, tiles_m, tiles_n, num_panels, KIND, GROUP,
    )  # fmt: skip
    for tile in range(gl.program_id(0), num_tiles, num_programs):
        # Looked up a tile ahead, and scales before the products: neither is waited for.
        next_expert, next_m, next_n, _, next_count = locate(
            gl.minimum(tile + num_programs, num_tiles - 1),
            offsets_ptr, tile_expert_ptr, tiles_m, tiles_n, num_panels, KIND, GROUP,
        )  # fmt: skip
        factor = gl.load(b_scales_ptr + expert)
        if BY_ROW:
            factor = factor * gl.load(a_scales_ptr + tile_m * 128 + lanes)[:, None]
        else:
            factor = factor * gl.load(a_scales_ptr + expert)
        if KIND == WEIGHT_GRAD:
            num_steps = count
        else:
            num_steps = steps
        sums0, sums1, index, phase = _multiply(
            a_bufs, b_bufs, ready, empty, index, phase, num_steps, HALF, STAGES
        )
        first, second = sums0 * factor, sums1 * factor
        row = tile_m * 128 + HALF * 64
        if KIND == GATE_UP:
            _finish_gate_up(
                out_desc, act_desc, buffer, weights_ptr, source_ptr, peaks_ptr, first, second,
                reciprocal(gl.load(act_scales_ptr + expert)), lanes, row, tile_m, tile_n, capacity, KEEP,
            )  # fmt: skip
        else:
            if KIND == WEIGHT_GRAD:
                # + 0: with no use but as a loop's bound, the carried count would be the first tile's for all.
                row += expert * m + gl.minimum(count, 0)
            if STORE == BULK:
                store_bulk(out_desc, buffer, row, tile_n * 256, first.to(gl.bfloat16))
                store_bulk(out_desc, buffer, row, tile_n * 256 + 128, second.to(gl.bfloat16))
            else:
                store_direct(out_ptr, row, tile_n * 256, first, n, STORE)
                store_direct(out_ptr, row, tile_n * 256 + 128, second, n, STORE)
        expert, tile_m, tile_n, count = next_expert, next_m, next_n, next_count
    tma.store_wait(0)


@QuickLaunch
@gluon.jit(do_not_specialize=["m", "n", "steps", "capacity", "num_experts", "num_programs"])
def fp8_fast_gemm_kernel(
    a_desc, b_desc, out_desc, act_desc, out_ptr, a_scales_ptr, b_scales_ptr, weights_ptr, source_ptr,
    act_scales_ptr, peaks_ptr, offsets_ptr, tile_expert_ptr, m, n, steps, capacity, num_experts, num_programs,
    KIND: gl.constexpr, STORE: gl.constexpr, KEEP: gl.constexpr, BY_ROW: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
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
                weights_ptr, source_ptr, act_scales_ptr, peaks_ptr, offsets_ptr, tile_expert_ptr,
                m, n, steps, capacity, num_experts, num_programs,
                0, KIND, STORE, KEEP, BY_ROW, GROUP, STAGES,
            )),
            (_consumer, (
                out_desc, act_desc, out_ptr, a_bufs, b_bufs, c_bufs, ready, empty, a_scales_ptr, b_scales_ptr,
                weights_ptr, source_ptr, act_scales_ptr, peaks_ptr, offsets_ptr, tile_expert_ptr,
                m, n, steps, capacity, num_experts, num_programs,
                1, KIND, STORE, KEEP, BY_ROW, GROUP, STAGES,
            )),
            (producer, (
                a_desc, b_desc, a_bufs, b_bufs, ready, empty, offsets_ptr, tile_expert_ptr,
                m, n, steps, capacity // 128, num_experts, num_programs, KIND, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
