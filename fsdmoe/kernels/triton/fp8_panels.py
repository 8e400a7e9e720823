"""Token panels in fp8: the operands of weight gradients, which contract over tokens.

fp8 matrix units want both operands with the contracted dim innermost. A panel holds 128 tokens so::

    codes [M/128, C, 128]      128 channels of a panel are 16 KiB in one piece: one bulk copy of a GEMM

Of the 128 tokens, each 16th lie next to each other, in every panel alike, so that sums over tokens are the
same: a thread that reads those writes eight bytes of a channel, and a warp whole lines of the cache.

Gradients have a scale for each channel of a panel, ``[M/128, C]``; activations one for 128 channels of all
tokens of an expert, ``[E, C/128]``, or for all channels, ``[E, 1]``, known beforehand, so that it leaves
the GEMM's inner loop.
Sizes: R rows, C channels, E experts, M sorted rows with padding (a multiple of 128).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from fsdmoe.kernels.triton.fp8_rows import Codes
from fsdmoe.kernels.triton.fp8_scale import (
    BLOCK,
    FP8,
    as_bytes,
    as_words,
    block_scale,
    from_codes,
    transposed_codes,
)
from fsdmoe.kernels.triton.launch import QuickLaunch
from fsdmoe.kernels.triton.row_map import RowMap

_CHANNELS = tl.constexpr(64)
_NUM_WARPS = 4
# Tokens that the threads of a program read at a time, 8 channels each.
_STRIDE = tl.constexpr(16)
assert _STRIDE.value == 32 * _NUM_WARPS * 8 // _CHANNELS.value


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def _panels_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    source_ptr,
    offsets_ptr,
    tile_expert_ptr,
    num_rows,
    num_columns,
    scale_width,
    num_experts,
    TOP_K: tl.constexpr,
    CODED: tl.constexpr,
    GIVEN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Channels are the slow index of the grid: what all programs read at a time then stays in the L2 cache.
    block = tl.program_id(0)
    first = tl.program_id(1) * _CHANNELS
    if block * 128 < tl.load(offsets_ptr + num_experts):
        channels = first + tl.arange(0, _CHANNELS)
        source = tl.load(source_ptr + block * 128 + tl.arange(0, 128))
        row = (source // TOP_K).to(tl.int64)
        at = row[:, None] * num_columns + channels[None, :]
        if CODED:
            row_scales = tl.load(x_scales_ptr + first // 128 * num_rows + row, mask=source >= 0, other=0.0)
            codes = tl.load(x_ptr + at, mask=(source >= 0)[:, None], other=0)
            values = from_codes(codes) * row_scales[:, None]
        else:
            values = tl.load(x_ptr + at, mask=(source >= 0)[:, None], other=0.0).to(tl.float32)
        if GIVEN:
            expert = tl.load(tile_expert_ptr + block)
            scale = tl.load(scales_ptr + expert * (num_columns // scale_width) + first // scale_width)
            values *= tl.div_rn(1.0, scale)
        else:
            scales = block_scale(tl.max(tl.abs(values), 0), POWER_OF_TWO)
            tl.store(scales_ptr + block * num_columns + channels, scales)
            values *= tl.div_rn(1.0, scales)[None, :]
        base = codes_ptr + (block.to(tl.int64) * num_columns + first) * 128
        piece = tl.arange(0, _CHANNELS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(as_words(base) + piece, transposed_codes(values, _STRIDE, _CHANNELS, INTERPRETED))


def gather_panels(
    x: torch.Tensor | Codes, row_map: RowMap, *, power_of_two: bool, scales_EB: torch.Tensor | None = None
) -> Codes:
    """The map's rows of ``x`` (values ``[R, C]``, or codes with scales ``[C/128, R]``) as panels, padding
    zero; with the expert's scales ``[E, C/128]`` or ``[E, 1]`` where they are given, else with a scale for
    each channel of a panel. Past the last segment nothing is written."""
    if isinstance(x, torch.Tensor):
        x_RC = x
        row_scales = x
    else:
        x_RC = as_bytes(x.codes)
        row_scales = x.scales
    num_columns, num_panels = x_RC.shape[1], row_map.capacity // BLOCK
    codes = torch.empty(num_panels, num_columns, BLOCK, device=x_RC.device, dtype=FP8)
    scales = scales_EB
    if scales is None:
        scales = torch.empty(num_panels, num_columns, device=x_RC.device, dtype=torch.float32)
    _panels_kernel[(num_panels, num_columns // _CHANNELS.value)](
        x_RC,
        row_scales,
        as_bytes(codes),
        scales,
        row_map.source_M,
        row_map.offsets,
        row_map.tile_expert,
        len(x_RC),
        num_columns,
        BLOCK if scales_EB is None else num_columns // scales_EB.shape[1],
        row_map.num_experts,
        TOP_K=row_map.top_k,
        CODED=not isinstance(x, torch.Tensor),
        GIVEN=scales_EB is not None,
        POWER_OF_TWO=power_of_two,
        INTERPRETED=knobs.runtime.interpret,
        num_warps=_NUM_WARPS,
    )
    return Codes(codes, scales)
