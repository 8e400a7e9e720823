"""Weight gradients in bf16 for Hopper whose rows are fetched through the map, not sorted beforehand.

    out[e] (+)= left[rows of e]^T @ right[rows of e]        one sorted, [M, ...], the other not, [R, ...]

A sorted copy is K times as large as what it copies, is written in full and read again. Here four warps of
a program fill a ring of STAGES buffers, by bulk copies (TMA) from the sorted operand and 16 bytes a thread
from the rows of the other, and three warpgroups multiply. Warpgroup PART owns rows 64 PART .. 64 PART + 63 of
a tile of 192 x 256, as two accumulators of 64 x 128. Such a tile moves a fifth less from the L2 cache than
one of 128 x 256; on an H200, whose clock falls until its power suffices, what is not moved is time.

    ready[i]   copies into stage i have landed      (1 arrival by the bulk copies, 1 of each fetching thread)
    empty[i]   all warpgroups have read stage i     (1 arrival of each)

Sizes: R rows, M sorted rows with padding, E experts; ``a``, ``b`` rows and columns of an expert's gradient.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fsdmoe.kernels.gluon.compat import async_load, tma_load
from fsdmoe.kernels.gluon.fp8_launch import describe
from fsdmoe.kernels.gluon.fp8_tiles import ADD, BULK, OVERWRITE, next_stage, store_bulk, store_direct
from fsdmoe.kernels.triton.launch import QuickLaunch, num_programs
from fsdmoe.kernels.triton.row_map import RowMap

_STAGES = 3
_GROUP = 16
# Of a warpgroup's thread, of which accumulators take 128; what is left of 512 a lane suffices to fetch.
_REGISTERS = 160

_ACCUMULATOR = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
# Of 64 rows a warp fetches 128 bytes of four at a time, or 256 of two.
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_BROAD = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _locate(tile, offsets_ptr, counts_ptr, tiles_a, tiles_b, GROUP: gl.constexpr):
    """-> expert, its first sorted row, steps of 64 rows, row and column of its gradient

    Rows run fastest inside groups of GROUP row tiles: programs that run together share columns' operands."""
    expert = tile // (tiles_a * tiles_b)
    local = tile % (tiles_a * tiles_b)
    first = local // (GROUP * tiles_b) * GROUP
    height = gl.minimum(tiles_a - first, GROUP)
    rest = local - first * tiles_b
    start = gl.load(offsets_ptr + expert)
    # A broken promise of max_rows leaves an expert fewer places than it has rows.
    count = gl.minimum(gl.load(counts_ptr + expert), gl.load(offsets_ptr + expert + 1) - start)
    return expert, start, (count + 63) // 64, (first + rest % height) * 192, rest // height * 256


@gluon.jit
def _producer(
    left_desc, right_desc, rows_ptr, source_ptr, left_bufs, right_bufs, ready, empty, offsets_ptr, counts_ptr,
    a, b, num_experts, num_programs,
    FETCH_LEFT: gl.constexpr, TOP_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = _NARROW if FETCH_LEFT else _BROAD
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64 if FETCH_LEFT else 128, layout=gl.SliceLayout(0, LAYOUT))
    tiles_a, tiles_b = gl.cdiv(a, 192), b // 256
    index = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), num_experts * tiles_a * tiles_b, num_programs):
        _, start, num_steps, row, column = _locate(tile, offsets_ptr, counts_ptr, tiles_a, tiles_b, GROUP)
        for step in range(num_steps):
            source = gl.load(source_ptr + start + step * 64 + lanes)
            token = (gl.maximum(source, 0) // TOP_K).to(gl.int64)
            is_row = (source >= 0)[:, None]  # padding comes as zeros
            at_row = start + step * 64
            mbarrier.wait(empty.index(index), phase)
            landed = ready.index(index)
            if FETCH_LEFT:
                mbarrier.expect(landed, 64 * 256 * 2)
                for half in gl.static_range(2):
                    tma_load(
                        right_desc, [at_row, column + half * 128], landed, right_bufs.index(index * 2 + half)
                    )
                at = rows_ptr + token[:, None] * a + (row + columns)[None, :]
                for part in gl.static_range(3):
                    wanted = is_row & (row + part * 64 < a)
                    async_load(left_bufs.index(index * 3 + part), at + part * 64, mask=wanted)
            else:
                mbarrier.expect(landed, 64 * 192 * 2)
                for part in gl.static_range(3):
                    tma_load(left_desc, [at_row, row + part * 64], landed, left_bufs.index(index * 3 + part))
                at = rows_ptr + token[:, None] * b + (column + columns)[None, :]
                for half in gl.static_range(2):
                    async_load(right_bufs.index(index * 2 + half), at + half * 128, mask=is_row)
            async_copy.mbarrier_arrive(landed, increment_count=False)
            index, phase = next_stage(index, phase, STAGES)


@gluon.jit
def _before(index, STAGES: gl.constexpr):
    """Computed, not carried: see ``fp8_fast_gemm``."""
    return gl.where(index == 0, STAGES - 1, index - 1)


@gluon.jit
def _multiply(
    left_bufs, right_bufs, ready, empty, index, phase, num_steps, PART: gl.constexpr, STAGES: gl.constexpr
):
    """All steps of a tile."""
    sums0 = gl.zeros([64, 128], gl.float32, layout=_ACCUMULATOR)
    sums1 = gl.zeros([64, 128], gl.float32, layout=_ACCUMULATOR)
    for step in range(num_steps):
        mbarrier.wait(ready.index(index), phase)
        fence_async_shared()  # threads have written what the matrix unit reads
        left = left_bufs.index(index * 3 + PART).permute((1, 0))
        sums0 = warpgroup_mma(left, right_bufs.index(index * 2), sums0, is_async=True)
        sums1 = warpgroup_mma(left, right_bufs.index(index * 2 + 1), sums1, is_async=True)
        # This step's two may be under way: the one before is done, and its stage has been read.
        sums0, sums1 = warpgroup_mma_wait(2, deps=(sums0, sums1))
        mbarrier.arrive(empty.index(_before(index, STAGES)), count=1, pred=step > 0)
        index, phase = next_stage(index, phase, STAGES)
    sums0, sums1 = warpgroup_mma_wait(0, deps=(sums0, sums1))
    # An expert without rows has no step, and no stage to give back.
    mbarrier.arrive(empty.index(_before(index, STAGES)), count=1, pred=num_steps > 0)
    return sums0, sums1, index, phase


@gluon.jit
def _consumer(
    out_desc, out_ptr, left_bufs, right_bufs, out_bufs, ready, empty, offsets_ptr, counts_ptr,
    a, b, num_experts, num_programs,
    PART: gl.constexpr, STORE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles_a, tiles_b = gl.cdiv(a, 192), b // 256
    index = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    buffer = out_bufs.index(PART)
    for tile in range(gl.program_id(0), num_experts * tiles_a * tiles_b, num_programs):
        expert, _, num_steps, row, column = _locate(tile, offsets_ptr, counts_ptr, tiles_a, tiles_b, GROUP)
        row += PART * 64
        if row < a:
            first, second, index, phase = _multiply(
                left_bufs, right_bufs, ready, empty, index, phase, num_steps, PART, STAGES
            )
            row += expert * a
            if STORE == BULK:
                store_bulk(out_desc, buffer, row, column, first.to(gl.bfloat16))
                store_bulk(out_desc, buffer, row, column + 128, second.to(gl.bfloat16))
            else:
                store_direct(out_ptr, row, column, first, b, STORE)
                store_direct(out_ptr, row, column + 128, second, b, STORE)
        else:  # below the gradient's last row: the others' stages pass by
            for _ in range(num_steps):
                mbarrier.wait(ready.index(index), phase)
                mbarrier.arrive(empty.index(index), count=1)
                index, phase = next_stage(index, phase, STAGES)
    tma.store_wait(0)


@QuickLaunch
@gluon.jit(do_not_specialize=["num_experts", "num_programs"])
def bf16_weight_grad_kernel(
    left_desc, right_desc, out_desc, out_ptr, rows_ptr, source_ptr, offsets_ptr, counts_ptr,
    a, b, num_experts, num_programs,
    FETCH_LEFT: gl.constexpr, STORE: gl.constexpr, TOP_K: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    left_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 3, 64, 64], left_desc.layout)
    right_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, 64, 128], right_desc.layout)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1 + 128)
        mbarrier.init(empty.index(i), count=3)
    gl.warp_specialize(
        [
            (_consumer, (
                out_desc, out_ptr, left_bufs, right_bufs, out_bufs, ready, empty, offsets_ptr, counts_ptr,
                a, b, num_experts, num_programs, 0, STORE, GROUP, STAGES,
            )),
            (_consumer, (
                out_desc, out_ptr, left_bufs, right_bufs, out_bufs, ready, empty, offsets_ptr, counts_ptr,
                a, b, num_experts, num_programs, 1, STORE, GROUP, STAGES,
            )),
            (_consumer, (
                out_desc, out_ptr, left_bufs, right_bufs, out_bufs, ready, empty, offsets_ptr, counts_ptr,
                a, b, num_experts, num_programs, 2, STORE, GROUP, STAGES,
            )),
            (_producer, (
                left_desc, right_desc, rows_ptr, source_ptr, left_bufs, right_bufs, ready, empty, offsets_ptr,
                counts_ptr, a, b, num_experts, num_programs, FETCH_LEFT, TOP_K, GROUP, STAGES,
            )),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, 512 - 3 * REGISTERS],
    )  # fmt: skip


def supports_fetching(d: int, n: int) -> bool:
    """Whether a layer's gradients are whole tiles: [2N, D] and [D, N], cut at 64 rows and 256 columns."""
    return d % 256 == 0 and n % 256 == 0


def weight_grad_fetched(
    left: torch.Tensor,
    right: torch.Tensor,
    row_map: RowMap,
    out_EAB: torch.Tensor,
    *,
    fetch_left: bool,
    accumulate: bool,
    spare_sms: int = 0,
) -> None:
    """Write or add ``left^T @ right`` of each expert's rows into ``out`` (contiguous, fp32 or bf16). One of
    the two is sorted, ``[M, ...]``, its padding zero; rows of the other, ``[R, ...]``, are fetched."""
    store = ADD if accumulate else BULK if out_EAB.dtype == torch.bfloat16 else OVERWRITE
    num_experts, a, b = out_EAB.shape
    out = out_EAB.view(-1, b)
    programs = num_programs(left.device, spare_sms)
    bf16_weight_grad_kernel[(programs,)](
        describe(left, 64, 64),
        describe(right, 64),
        describe(out if store == BULK else right, 64),
        out,
        left if fetch_left else right,
        row_map.source_M,
        row_map.offsets,
        row_map.counts_E,
        a,
        b,
        num_experts,
        programs,
        FETCH_LEFT=fetch_left,
        STORE=store.value,
        TOP_K=row_map.top_k,
        GROUP=_GROUP,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS,
        num_warps=4,
        maxnreg=128,
    )


def weight_grad_fetched_reference(
    left: torch.Tensor,
    right: torch.Tensor,
    row_map: RowMap,
    out_EAB: torch.Tensor,
    *,
    fetch_left: bool,
    accumulate: bool,
    spare_sms: int = 0,
) -> None:
    """The same in plain torch, expert by expert; in fp64 where ``out`` is."""
    for expert, out_AB in enumerate(out_EAB):
        start = int(row_map.offsets[expert])
        rows = slice(start, start + int(row_map.counts_E[expert]))
        tokens = row_map.source_M[rows] // row_map.top_k
        operands = (left[tokens], right[rows]) if fetch_left else (left[rows], right[tokens])
        wide_left, wide_right = (t.to(torch.promote_types(torch.float32, out_AB.dtype)) for t in operands)
        product = wide_left.T @ wide_right
        out_AB.copy_(out_AB + product if accumulate else product)
