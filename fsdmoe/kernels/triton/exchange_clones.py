"""Weights of cloned experts into other ranks' memory, and gradients of clones out of it.

::

    push_clones   each of this rank's experts to all slots that hold it     own weights -> others' slots
    copy_slots    what came, out of the shared area; gradients into it      slots <-> memory of this rank
    add_clones    what the clones of an expert have, added to its gradient  others' slots -> own gradients

Every rank has S slots. A plan on the device tells their experts (``ClonePlan.experts_PS``; E where a slot is
free), and nothing is moved for a slot that is free. Weights are written to those who need them, as rows are.
Gradients are read by those who need them: so each rank needs memory for its own slots alone. They are added
in fp32 and in the order of ranks, each element by one thread, so that a run can be repeated bit by bit.

Where a rank did not come to a barrier in time (``missing``), what is read is not a number, as for rows
(:mod:`fsdmoe.kernels.triton.exchange_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.exchange_rows import Peers, in_units, load_units
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2

_UNITS = 4096
"""Of up to 16 bytes, that a block loads before it writes them: see ``exchange_rows``."""
_SUMS = 8192
"""Elements that a block adds up at a time."""


@QuickLaunch
@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _push_kernel(
    weight_ptr, experts_ptr, own_ptr, peers_ptr, first_expert, num_experts,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, NUM_SLOTS: tl.constexpr, NUM_ALL: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    words_of_16_bytes: tl.constexpr = 128 // own_ptr.dtype.element_ty.primitive_bitwidth
    for place in range(NUM_ALL):
        expert = tl.load(experts_ptr + place) - first_expert
        if (expert >= 0) & (expert < num_experts):
            distance = tl.load(peers_ptr + place // NUM_SLOTS) * words_of_16_bytes
            from_ptr = weight_ptr + expert.to(tl.int64) * (WIDTH * WORDS)
            to_ptr = own_ptr + distance + tl.cast(place % NUM_SLOTS, tl.int64) * (WIDTH * WORDS)
            for begin in range(tl.program_id(0) * UNITS, WIDTH, tl.num_programs(0) * UNITS):
                units = begin + tl.arange(0, UNITS)
                inside = units < WIDTH
                values = load_units(from_ptr, units, inside, WORDS)
                at = units.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
                tl.store(to_ptr + at, values, mask=inside[:, None])


def push_clones(weight: torch.Tensor, experts_PS: torch.Tensor, peers: Peers, rank: int, blocks: int) -> None:
    """``weight`` ``[L, ...]`` of this rank's experts, each into the slots that hold it: ``peers`` is the area
    for slots of this weight."""
    words, width, unit = in_units(weight.reshape(len(weight), -1), peers.own)
    if not words.numel():
        return
    _push_kernel[(min(blocks, cdiv(width, _UNITS)),)](
        words, experts_PS, peers.own.view(words.dtype), peers.distances, rank * len(weight), len(weight),
        WIDTH=width, WORDS=unit, NUM_SLOTS=experts_PS.shape[1], NUM_ALL=experts_PS.numel(), UNITS=_UNITS,
        num_warps=32,
    )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["num_experts"])
def _copy_kernel(
    from_ptr, to_ptr, experts_ptr, missing_ptr, num_experts,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, FILLS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    is_taken = tl.load(experts_ptr + slot) < num_experts
    end = tl.where(is_taken, WIDTH, 0)
    if FILLS:
        end = WIDTH
    if end > 0:
        units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        inside = units < WIDTH
        begin = slot.to(tl.int64) * (WIDTH * WORDS)
        values = load_units(from_ptr + begin, units, inside, WORDS)
        values = tl.where(is_taken, values, tl.zeros_like(values))
        # All bits set is NaN in every format of floating point.
        values = tl.where(is_taken & (tl.load(missing_ptr) != 0), ~tl.zeros_like(values), values)
        at = units.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        tl.store(to_ptr + begin + at, values, mask=inside[:, None])


def copy_slots(
    source: torch.Tensor, to: torch.Tensor, experts_S: torch.Tensor, num_experts: int, missing: torch.Tensor,
    *, fills: bool = False,
) -> None:  # fmt: skip
    """Of each slot that is taken, from or to an area of bytes; one of both tells the slots' shape. ``fills``:
    zeros to those that are free, which otherwise stay as they are."""
    is_to_area = to.dtype == torch.uint8 and to.dim() == 1
    slots = source if is_to_area else to
    area = to if is_to_area else source
    words, width, unit = in_units(slots.view(len(slots), -1), area)
    if not words.numel():
        return
    own = area.view(words.dtype)
    given = (words, own) if is_to_area else (own, words)
    _copy_kernel[(cdiv(width, _UNITS // 4), len(experts_S))](
        *given, experts_S, missing, num_experts,
        WIDTH=width, WORDS=unit, FILLS=fills, UNITS=_UNITS // 4, num_warps=8,
    )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _add_kernel(
    total_ptr, experts_ptr, own_ptr, peers_ptr, missing_ptr, first_expert, num_experts,
    WIDTH: tl.constexpr, NUM_SLOTS: tl.constexpr, NUM_ALL: tl.constexpr, LANES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    words_of_16_bytes: tl.constexpr = 128 // own_ptr.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, LANES)
    is_missing = tl.load(missing_ptr) != 0
    for place in range(NUM_ALL):
        taken = tl.load(experts_ptr + place)
        expert = taken - first_expert
        before = tl.load(experts_ptr + lanes, mask=lanes < place, other=-1)
        # The first of an expert's clones stands for all of them.
        is_first = tl.sum((before == taken).to(tl.int32), 0) == 0
        if (expert >= 0) & (expert < num_experts) & is_first:
            out_ptr = total_ptr + expert.to(tl.int64) * WIDTH
            for begin in range(tl.program_id(0) * ELEMENTS, WIDTH, tl.num_programs(0) * ELEMENTS):
                at = begin + tl.arange(0, ELEMENTS)
                inside = at < WIDTH
                total = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
                for other in range(place, NUM_ALL):
                    end = tl.where(tl.load(experts_ptr + other) == taken, WIDTH, 0)
                    distance = tl.load(peers_ptr + other // NUM_SLOTS) * words_of_16_bytes
                    from_ptr = own_ptr + distance + tl.cast(other % NUM_SLOTS, tl.int64) * WIDTH
                    # Not by way of the first cache, which knows nothing of what other GPUs write.
                    total += tl.load(from_ptr + at, mask=at < end, other=0.0, cache_modifier=".cg")
                total = tl.where(is_missing, float("nan"), total)
                tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_clones(
    total: torch.Tensor, experts_PS: torch.Tensor, peers: Peers, missing: torch.Tensor, rank: int, blocks: int
) -> None:
    """Add to ``total`` ``[L, ...]``, the gradient of this rank's experts, what stands in the slots of their
    clones in fp32: ``peers`` is the area for slots of this weight."""
    width = total[0].numel() if len(total) else 0
    if not width:
        return
    if not total.is_contiguous():
        raise AssertionError(f"expected a contiguous gradient, got strides {total.stride()}")
    _add_kernel[(min(blocks, cdiv(width, _SUMS)),)](
        total, experts_PS, peers.own.view(torch.float32), peers.distances, missing, rank * len(total),
        len(total),
        WIDTH=width, NUM_SLOTS=experts_PS.shape[1], NUM_ALL=experts_PS.numel(),
        LANES=max(2, next_power_of_2(experts_PS.numel())), ELEMENTS=_SUMS, num_warps=16,
    )  # fmt: skip
