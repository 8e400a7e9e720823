"""SwiGLU x weight, backward, with quantised results: persistent, the next tile's operands come by bulk copies
under this one's arithmetic.

    reads   gate, up, d act          bf16, tiles of 128 tokens x 128 channels
    writes  d pre as rows            [M, 2N] with 1 x 128 scales: the operand of d x
            d pre as panels          [M/128, 2N, 128] with a scale a channel: of d gate_up
            the activation's panels  [M/128, N, 128] with the expert's scales, which are given: of d down
            parts of d weights       [N/128, M], to be summed over the blocks

Everything is quantised from what bf16 holds of it, as if it had been stored. A thread has 4 tokens x 4
channels at a time, so that either copy is made of 4-byte pieces; 32 tokens are worked on at once, because
128 would spill. Sizes: M sorted rows with padding, N expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fsdmoe.kernels.gluon.compat import block_barrier, tma_load
from fsdmoe.kernels.gluon.fp8_launch import describe
from fsdmoe.kernels.gluon.fp8_math import block_scale, reciprocal, rounded_to_bf16, sigmoid
from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import BLOCK, FP8, as_bytes
from fsdmoe.kernels.triton.launch import QuickLaunch, num_programs
from fsdmoe.kernels.triton.row_map import RowMap

_CHUNK = gl.constexpr(gl.BlockedLayout([4, 4], [1, 32], [8, 1], [1, 0]))
_TURNED = gl.constexpr(gl.BlockedLayout([1, 16], [16, 2], [8, 1], [1, 0]))


@gluon.jit
def _put_panel(codes, ptr, block, first, width, CHUNK: gl.constexpr):
    """32 tokens x 128 channels, transposed into their part of a panel."""
    turned = gl.convert_layout(gl.permute(codes.to(gl.uint8, bitcast=True), (1, 0)), _TURNED)
    channels = gl.arange(0, 128, layout=gl.SliceLayout(1, _TURNED))
    tokens = CHUNK * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, _TURNED))
    base = ptr + (block.to(gl.int64) * width + first) * 128
    gl.store(base + channels[:, None] * 128 + tokens[None, :], turned)


@gluon.jit
def _put_panels(chunks, largest, ptr, scales_ptr, block, lanes, first, width, POWER_OF_TWO: gl.constexpr):
    scales = block_scale(gl.max(largest, axis=0), POWER_OF_TWO)
    gl.store(scales_ptr + block * width + first + lanes, scales)
    inverse = reciprocal(scales)[None, :]
    for chunk in gl.static_range(4):
        codes = (chunks[chunk].to(gl.float32) * inverse).to(gl.float8e4nv)
        _put_panel(codes, ptr, block, first, width, chunk)


@gluon.jit
def _put_rows(values, ptr, scales_ptr, rows, lanes, first, width, capacity, POWER_OF_TWO: gl.constexpr):
    scales = block_scale(gl.max(gl.abs(values), axis=1), POWER_OF_TWO)
    gl.store(scales_ptr + (first // 128) * capacity + rows, scales)
    codes = (values * reciprocal(scales)[:, None]).to(gl.float8e4nv)
    at = ptr + rows.to(gl.int64)[:, None] * width + first + lanes[None, :]
    gl.store(at, codes.to(gl.uint8, bitcast=True))


@gluon.jit
def _fetch(pre_desc, dact_desc, bufs, landed, index, tile, tiles_n, capacity, wanted):
    row = tile // tiles_n * 128
    column = tile % tiles_n * 128
    mbarrier.expect(landed, 3 * 128 * 128 * 2, pred=wanted)
    tma_load(pre_desc, [row, column], landed, bufs.index(3 * index), pred=wanted)
    tma_load(pre_desc, [capacity + row, column], landed, bufs.index(3 * index + 1), pred=wanted)
    tma_load(dact_desc, [row, column], landed, bufs.index(3 * index + 2), pred=wanted)


@gluon.jit
def _chunk(
    bufs, current, weights_ptr, parts_ptr, act_ptr, act_inverse, block, tile_n, tiles_n, tokens, capacity,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """32 tokens: -> their rows, d gate and d up as bf16 holds them; the activation goes to its panel."""
    rows = block * 128 + CHUNK * 32 + tokens
    weight = gl.load(weights_ptr + rows)
    gate = bufs.index(3 * current).slice(CHUNK * 32, 32).load(_CHUNK).to(gl.float32)
    up = bufs.index(3 * current + 1).slice(CHUNK * 32, 32).load(_CHUNK).to(gl.float32)
    dact = bufs.index(3 * current + 2).slice(CHUNK * 32, 32).load(_CHUNK).to(gl.float32)
    sigma = sigmoid(gate)
    silu = gate * sigma
    product = silu * up
    gl.store(parts_ptr + tile_n * capacity + rows, gl.sum(dact * product, axis=1))
    act = rounded_to_bf16(product * weight[:, None])
    codes = (act * act_inverse).to(gl.float8e4nv)
    _put_panel(codes, act_ptr, block, tile_n * 128, tiles_n * 128, CHUNK)
    dact = dact * weight[:, None]
    dgate = (dact * up * (sigma + silu * (1.0 - sigma))).to(gl.bfloat16)
    return rows, dgate, (dact * silu).to(gl.bfloat16)


@QuickLaunch
@gluon.jit(do_not_specialize=["capacity", "num_experts", "num_programs"])
def fp8_swiglu_grad_kernel(
    pre_desc, dact_desc, weights_ptr, offsets_ptr, tile_expert_ptr, act_scales_ptr, rows_ptr, row_scales_ptr,
    panels_ptr, panel_scales_ptr, act_ptr, parts_ptr, n, capacity, num_experts, num_programs,
    POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    bufs = gl.allocate_shared_memory(gl.bfloat16, [6, 128, 128], pre_desc.layout)  # two of gate, up, d act
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(landed.index(0), count=1)
    mbarrier.init(landed.index(1), count=1)
    tiles_n = n // 128
    num_tiles = gl.load(offsets_ptr + num_experts) // 128 * tiles_n
    program = gl.program_id(0)
    _fetch(pre_desc, dact_desc, bufs, landed.index(0), 0, program, tiles_n, capacity, program < num_tiles)
    lanes = gl.arange(0, 128, layout=gl.SliceLayout(0, _CHUNK))
    tokens = gl.arange(0, 32, layout=gl.SliceLayout(1, _CHUNK))
    turn = gl.to_tensor(0)
    for tile in range(program, num_tiles, num_programs):
        current = turn & 1
        block = tile // tiles_n
        tile_n = tile % tiles_n
        expert = gl.load(tile_expert_ptr + block)
        act_inverse = reciprocal(gl.load(act_scales_ptr + expert * tiles_n + tile_n))
        # All threads have read the other buffers before copies write them again for the next tile.
        fence_async_shared()
        block_barrier()
        following = tile + num_programs
        _fetch(
            pre_desc, dact_desc, bufs, landed.index(current ^ 1), current ^ 1, following, tiles_n, capacity,
            following < num_tiles,
        )  # fmt: skip
        mbarrier.wait(landed.index(current), (turn >> 1) & 1)
        largest_gate = gl.zeros([32, 128], gl.float32, layout=_CHUNK)
        largest_up = gl.zeros([32, 128], gl.float32, layout=_CHUNK)
        gates = ()
        ups = ()
        for chunk in gl.static_range(4):
            rows, dgate, dup = _chunk(
                bufs, current, weights_ptr, parts_ptr, act_ptr, act_inverse, block, tile_n, tiles_n, tokens,
                capacity, chunk,
            )  # fmt: skip
            wide = dup.to(gl.float32)
            _put_rows(
                wide, rows_ptr, row_scales_ptr, rows, lanes, n + tile_n * 128, 2 * n, capacity, POWER_OF_TWO
            )
            largest_up = gl.maximum(largest_up, gl.abs(wide))
            wide = dgate.to(gl.float32)
            _put_rows(
                wide, rows_ptr, row_scales_ptr, rows, lanes, tile_n * 128, 2 * n, capacity, POWER_OF_TWO
            )
            largest_gate = gl.maximum(largest_gate, gl.abs(wide))
            gates += (dgate,)  # type: ignore[assignment]
            ups += (dup,)  # type: ignore[assignment]
        _put_panels(
            ups, largest_up, panels_ptr, panel_scales_ptr, block, lanes, n + tile_n * 128, 2 * n, POWER_OF_TWO
        )
        _put_panels(
            gates, largest_gate, panels_ptr, panel_scales_ptr, block, lanes, tile_n * 128, 2 * n, POWER_OF_TWO
        )
        turn += 1


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
    act_scales_EB: torch.Tensor,
    row_map: RowMap,
    *,
    power_of_two: bool,
) -> SwigluGrad:
    """See the module's text; ``weights_M`` (fp32) are zero for padding, whose gradients then are zeros."""
    _, capacity, n = pre_2MN.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device=pre_2MN.device, dtype=dtype)

    num_panels, blocks = capacity // BLOCK, n // BLOCK
    rows = Codes(empty(capacity, 2 * n, dtype=FP8), empty(2 * blocks, capacity))
    panels = Codes(empty(num_panels, 2 * n, BLOCK, dtype=FP8), empty(num_panels, 2 * n))
    act_panels = Codes(empty(num_panels, n, BLOCK, dtype=FP8), act_scales_EB)
    parts = empty(blocks, capacity)
    programs = num_programs(pre_2MN.device)
    fp8_swiglu_grad_kernel[(programs,)](
        describe(pre_2MN.view(2 * capacity, n), BLOCK),
        describe(dact_MN, BLOCK),
        weights_M,
        row_map.offsets,
        row_map.tile_expert,
        act_scales_EB,
        as_bytes(rows.codes),
        rows.scales,
        as_bytes(panels.codes),
        panels.scales,
        as_bytes(act_panels.codes),
        parts,
        n,
        capacity,
        row_map.num_experts,
        programs,
        POWER_OF_TWO=power_of_two,
        num_warps=8,
    )
    return SwigluGrad(rows, panels, act_panels, parts)
