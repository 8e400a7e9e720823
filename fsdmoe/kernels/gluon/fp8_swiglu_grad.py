"""SwiGLU x weight, backward, with quantised results: persistent, two programs a multiprocessor.

    reads   gate, up, d act          bf16, tiles of 128 tokens x 128 channels
    writes  d pre as rows            [M, 2N] with 1 x 128 scales: the operand of d x
            d pre as panels          [M/128, 2N, 128] with a scale a channel: of d gate_up
            the activation's panels  [M/128, N, 128] with the expert's scales, which are given: of d down
            parts of d weights       [N/128, M], to be summed over the blocks

Everything is quantised from what bf16 holds of it, as if it had been stored. A tile passes through shared
memory twice: rows are worked on 32 tokens at a time, and what panels need overwrites what it came from; then
panels are read by channel. So the registers of 128 x 128 elements are never needed at once, and two programs
share a multiprocessor: one computes under the other's copies.
Sizes: M sorted rows with padding, N expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fsdmoe.kernels.gluon.compat import block_barrier, tma_load
from fsdmoe.kernels.gluon.fp8_launch import describe
from fsdmoe.kernels.gluon.fp8_math import block_scale, reciprocal, rounded_to_bf16, sigmoid, to_bf16
from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8, as_bytes
from fsdmoe.kernels.triton.launch import QuickLaunch, num_programs
from fsdmoe.kernels.triton.row_map import RowMap

# Rows: a thread has 16 channels of a token, half of them in either 128 bytes that a tile's row is cut into.
_BY_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 128],
    )
)
# Panels: a thread reads 8 channels of each 16th token, and has what lies next to each other in them (see
# ``triton/fp8_panels.py``): the same 64 elements, in an order of their own. A warp writes whole lines.
_BY_TOKEN = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [1, 8], [0, 1]))
_BY_CHANNEL = gl.constexpr(gl.BlockedLayout([8, 8], [2, 16], [8, 1], [1, 0]))


@gluon.jit
def _put_rows(values, ptr, scales_ptr, rows, lanes, first, width, capacity, POWER_OF_TWO: gl.constexpr):
    scales = block_scale(gl.max(gl.abs(values), axis=1), POWER_OF_TWO)
    gl.store(scales_ptr + (first // 128) * capacity + rows, scales)
    codes = (values * reciprocal(scales)[:, None]).to(gl.float8e4nv)
    at = ptr + rows.to(gl.int64)[:, None] * width + first + lanes[None, :]
    gl.store(at, codes.to(gl.uint8, bitcast=True))


@gluon.jit
def _rows(
    gates, ups, dacts, weights_ptr, parts_ptr, rows_ptr, row_scales_ptr, block, tile_n, tiles_n, capacity,
    CHUNK: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """32 tokens: d pre goes out as rows; d gate, d up and the activation replace gate, up and d act."""
    lanes = gl.arange(0, 128, layout=gl.SliceLayout(0, _BY_ROW))
    rows = block * 128 + CHUNK * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, _BY_ROW))
    weight = gl.load(weights_ptr + rows)
    gate_buf, up_buf = gates.slice(CHUNK * 32, 32), ups.slice(CHUNK * 32, 32)
    dact_buf = dacts.slice(CHUNK * 32, 32)
    gate = gate_buf.load(_BY_ROW).to(gl.float32)
    up = up_buf.load(_BY_ROW).to(gl.float32)
    dact = dact_buf.load(_BY_ROW).to(gl.float32)
    sigma = sigmoid(gate)
    silu = gate * sigma
    product = silu * up
    gl.store(parts_ptr + tile_n * capacity + rows, gl.sum(dact * product, axis=1))
    dact_buf.store(to_bf16(product * weight[:, None]))
    dact = dact * weight[:, None]
    dup = rounded_to_bf16(dact * silu)
    up_buf.store(to_bf16(dup))
    width = tiles_n * 256
    first = (tiles_n + tile_n) * 128
    _put_rows(dup, rows_ptr, row_scales_ptr, rows, lanes, first, width, capacity, POWER_OF_TWO)
    dgate = rounded_to_bf16(dact * up * (sigma + silu * (1.0 - sigma)))
    gate_buf.store(to_bf16(dgate))
    _put_rows(dgate, rows_ptr, row_scales_ptr, rows, lanes, tile_n * 128, width, capacity, POWER_OF_TWO)


@gluon.jit
def _put_panel(values, inverse, ptr, block, first, width):
    """128 tokens x 128 channels, channel by channel."""
    channels = gl.arange(0, 128, layout=gl.SliceLayout(1, _BY_CHANNEL))
    places = gl.arange(0, 128, layout=gl.SliceLayout(0, _BY_CHANNEL))
    transposed = (values * inverse).reshape([8, 16, 128]).permute((2, 1, 0)).reshape([128, 128])
    codes = gl.convert_layout(transposed, _BY_CHANNEL).to(gl.float8e4nv)
    base = ptr + (block.to(gl.int64) * width + first) * 128
    gl.store(base + channels[:, None] * 128 + places[None, :], codes.to(gl.uint8, bitcast=True))


@gluon.jit
def _scaled_panel(buffer, ptr, scales_ptr, block, first, width, POWER_OF_TWO: gl.constexpr):
    channels = gl.arange(0, 128, layout=gl.SliceLayout(0, _BY_TOKEN))
    values = buffer.load(_BY_TOKEN).to(gl.float32)
    scales = block_scale(gl.max(gl.abs(values), axis=0), POWER_OF_TWO)
    gl.store(scales_ptr + block * width + first + channels, scales)
    _put_panel(values, reciprocal(scales)[None, :], ptr, block, first, width)


@gluon.jit
def _fetch(pre_desc, dact_desc, gates, ups, dacts, landed, tile, tiles_n, capacity, wanted):
    row = tile // tiles_n * 128
    column = tile % tiles_n * 128
    mbarrier.expect(landed, 3 * 128 * 128 * 2, pred=wanted)
    tma_load(pre_desc, [row, column], landed, gates, pred=wanted)
    tma_load(pre_desc, [capacity + row, column], landed, ups, pred=wanted)
    tma_load(dact_desc, [row, column], landed, dacts, pred=wanted)


@QuickLaunch
@gluon.jit(do_not_specialize=["capacity", "num_experts", "num_programs"])
def fp8_swiglu_grad_kernel(
    pre_desc, dact_desc, weights_ptr, offsets_ptr, tile_expert_ptr, act_scales_ptr, rows_ptr, row_scales_ptr,
    panels_ptr, panel_scales_ptr, act_ptr, parts_ptr, n, capacity, num_experts, num_programs,
    POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    bufs = gl.allocate_shared_memory(gl.bfloat16, [3, 128, 128], pre_desc.layout)
    gates, ups, dacts = bufs.index(0), bufs.index(1), bufs.index(2)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    tiles_n = n // 128
    num_tiles = gl.load(offsets_ptr + num_experts) // 128 * tiles_n
    program = gl.program_id(0)
    _fetch(pre_desc, dact_desc, gates, ups, dacts, landed, program, tiles_n, capacity, program < num_tiles)
    phase = gl.to_tensor(0)
    for tile in range(program, num_tiles, num_programs):
        block = tile // tiles_n
        tile_n = tile % tiles_n
        expert = gl.load(tile_expert_ptr + block)
        act_inverse = reciprocal(gl.load(act_scales_ptr + expert * tiles_n + tile_n))
        mbarrier.wait(landed, phase)
        for chunk in gl.static_range(4):
            _rows(
                gates, ups, dacts, weights_ptr, parts_ptr, rows_ptr, row_scales_ptr, block, tile_n, tiles_n,
                capacity, chunk, POWER_OF_TWO,
            )  # fmt: skip
        block_barrier()  # panels read what other threads have written
        act = dacts.load(_BY_TOKEN).to(gl.float32)
        _put_panel(act, act_inverse, act_ptr, block, tile_n * 128, n)
        first = (tiles_n + tile_n) * 128
        _scaled_panel(ups, panels_ptr, panel_scales_ptr, block, first, 2 * n, POWER_OF_TWO)
        _scaled_panel(gates, panels_ptr, panel_scales_ptr, block, tile_n * 128, 2 * n, POWER_OF_TWO)
        # All threads have read the buffers before copies write them again for the next tile.
        fence_async_shared()
        block_barrier()
        following = tile + num_programs
        _fetch(
            pre_desc, dact_desc, gates, ups, dacts, landed, following, tiles_n, capacity,
            following < num_tiles,
        )  # fmt: skip
        phase ^= 1


class SwigluGrad(NamedTuple):
    rows: Codes
    """d pre ``[M, 2N]``, gates first, with scales ``[2N/128, M]``."""
    panels: Codes
    """d pre ``[M/128, 2N, 128]`` with scales ``[M/128, 2N]``."""
    act_panels: Codes
    """The activation ``[M/128, N, 128]`` with the scales that were given."""
    weight_parts: torch.Tensor
    """``[N/128, M]``: d weight of each sorted row is their sum."""


def swiglu_grad(
    pre_2MN: torch.Tensor,
    dact_MN: torch.Tensor,
    weights_M: torch.Tensor,
    act_scales: torch.Tensor,
    row_map: RowMap,
    *,
    power_of_two: bool,
) -> SwigluGrad:
    """See the module's text; ``weights_M`` (fp32) are zero for padding, whose gradients then are zeros. The
    activation's scales: ``[E, N/128]``."""
    _, capacity, n = pre_2MN.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device=pre_2MN.device, dtype=dtype)

    num_panels, blocks = capacity // BLOCK, n // BLOCK
    rows, panels = empty(capacity, 2 * n, dtype=FP8), empty(num_panels, 2 * n, BLOCK, dtype=FP8)
    act_panels = Codes(empty(num_panels, n, BLOCK, dtype=FP8), act_scales)
    parts = empty(blocks, capacity)
    row_scales, panel_scales = empty(2 * blocks, capacity), empty(num_panels, 2 * n)
    programs = 2 * num_programs(pre_2MN.device)
    fp8_swiglu_grad_kernel[(programs,)](
        describe(pre_2MN.view(2 * capacity, n), BLOCK),
        describe(dact_MN, BLOCK),
        weights_M,
        row_map.offsets,
        row_map.tile_expert,
        act_scales,
        as_bytes(rows),
        row_scales,
        as_bytes(panels),
        panel_scales,
        as_bytes(act_panels.codes),
        parts,
        n,
        capacity,
        row_map.num_experts,
        programs,
        POWER_OF_TWO=power_of_two,
        num_warps=8,
        maxnreg=128,
    )
    return SwigluGrad(Codes(rows, row_scales), Codes(panels, panel_scales), act_panels, parts)
