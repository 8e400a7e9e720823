"""Delayed scales of what passes between experts' projections, and the magnitudes that later ones follow from.

    delayed_scales   the history of a layer -> the scale of each expert [E], all the same; an expert's own
                     where there is no history yet, or where it is infinite
    expert_peaks     the largest magnitude of each sorted row and block of columns -> of each expert [E]

Codes saturate, infinities too. So an expert with an infinity among its rows has a scale that is not finite,
and so is all that its codes are multiplied into: whoever skips steps must see it.

Each is one launch: a dozen of torch's own for a few numbers would take as long as a pass over the rows.
Sizes: E experts, B blocks of columns, M sorted rows with padding, H steps of history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.fp8_scale import as_bits, block_scale, raise_to
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2
from fsdmoe.kernels.triton.row_map import RowMap


@QuickLaunch
@triton.jit(do_not_specialize=["num_experts"])
def _delayed_scales_kernel(
    history_ptr,
    peaks_ptr,
    out_ptr,
    num_experts,
    STEPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    HAS_PEAKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    experts = tl.arange(0, EXPERTS)
    # What only ever was zero has the scale 1.
    largest = tl.full([EXPERTS], 448.0, tl.float32)
    if HAS_PEAKS:
        largest = tl.load(peaks_ptr + experts, mask=experts < num_experts, other=0.0)
    if HAS_HISTORY:
        seen = tl.max(tl.load(history_ptr + tl.arange(0, STEPS)), 0)
        known = tl.where(seen > 0, seen, largest)
        largest = tl.where(largest < float("inf"), known, largest)
    tl.store(out_ptr + experts, block_scale(largest, POWER_OF_TWO), mask=experts < num_experts)


def delayed_scales(
    history_H: torch.Tensor | None, peaks_E: torch.Tensor | None, row_map: RowMap, *, power_of_two: bool
) -> torch.Tensor:
    """``[E]`` by the largest magnitude of the steps before; where it is zero, or there is no history, by
    those of the experts, where they are given."""
    given = history_H if peaks_E is None else peaks_E
    assert given is not None
    out_E = torch.empty(row_map.num_experts, device=given.device, dtype=torch.float32)
    _delayed_scales_kernel[(1,)](
        given if history_H is None else history_H,
        given,
        out_E,
        row_map.num_experts,
        STEPS=1 if history_H is None else len(history_H),
        EXPERTS=next_power_of_2(row_map.num_experts),
        HAS_HISTORY=history_H is not None,
        HAS_PEAKS=peaks_E is not None,
        POWER_OF_TWO=power_of_two,
        num_warps=4,
    )
    return out_E


@QuickLaunch
@triton.jit(do_not_specialize=["capacity", "blocks", "num_experts"])
def _expert_peaks_kernel(
    peaks_ptr, out_ptr, noted_ptr, scales_ptr, tile_expert_ptr, offsets_ptr, capacity, blocks, num_experts,
    BLOCKS: tl.constexpr, NOTES: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    tile, first = tl.program_id(0), tl.program_id(1) * BLOCKS
    if tile * 128 < tl.load(offsets_ptr + num_experts):
        rows = tile * 128 + tl.arange(0, 128)
        numbers = first + tl.arange(0, BLOCKS)
        at = numbers[:, None] * capacity + rows[None, :]
        peaks = tl.load(peaks_ptr + at, mask=(numbers < blocks)[:, None], other=0.0)
        largest = tl.max(tl.max(peaks, 1), 0)
        expert = tl.load(tile_expert_ptr + tile)
        raise_to(out_ptr + expert, largest)
        if NOTES:
            raise_to(noted_ptr, largest)
        if MARKS:
            tl.store(scales_ptr + expert, float("nan"), mask=largest == float("inf"))


def expert_peaks(
    peaks_BM: torch.Tensor,
    row_map: RowMap,
    noted: torch.Tensor | None,
    scales_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[E]``, zero of an expert without rows; the largest of all is noted too, where there is a place.
    ``scales_E``, which the codes were made with, become NaN where a row holds an infinity."""
    blocks, capacity = peaks_BM.shape
    out_E = torch.zeros(row_map.num_experts, device=peaks_BM.device)
    together = 16
    _expert_peaks_kernel[(capacity // 128, cdiv(blocks, together))](
        peaks_BM,
        as_bits(out_E),
        as_bits(out_E if noted is None else noted),
        out_E if scales_E is None else scales_E,
        row_map.tile_expert,
        row_map.offsets,
        capacity,
        blocks,
        row_map.num_experts,
        BLOCKS=together,
        NOTES=noted is not None,
        MARKS=scales_E is not None,
        num_warps=4,
    )
    return out_E
