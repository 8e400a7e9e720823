"""Which experts are cloned where, in one program: see ``fsdmoe/kernels/clone_plan.py``.

Prefix sums over pieces in descending order need no sort: a piece begins where the larger ones end, so it is
compared with all others. The others are rows of a tile whose columns belong to threads: sums stay in a thread
until the end. What threads tell each other goes through ``scratch_ptr``, every number to a place of its own,
so that a barrier after the stores is enough::

    rows of experts | where they end | spills of experts | spare rows of ranks | slots: experts | slots: rows
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, next_power_of_2

_BLOCK = 64  # what is compared with at a time
_NUM_WARPS = 8


@triton.jit
def _larger_before(values, numbers, values_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """For each value the sum of those at ``values_ptr`` that are larger, or equal and come before it."""
    total = tl.zeros([BLOCK, values.shape[0]], tl.int32)
    for first in tl.static_range(0, COUNT, BLOCK):
        others = first + tl.arange(0, BLOCK)
        other = tl.load(values_ptr + others, mask=others < COUNT, other=0, volatile=True)[:, None]
        comes_first = (others[:, None] < numbers[None, :]).to(tl.int32)
        total += tl.where(other > values[None, :] - comes_first, other, 0)
    return tl.sum(total, 0)


@triton.jit
def _around_mean(
    rows_ptr, rows_E, mean, e, p, NUM_RANKS: tl.constexpr, NUM_EXPERTS: tl.constexpr, UNROLLED: tl.constexpr
):
    """What the rank of an expert has above the mean, less its larger experts; what a rank has below it."""
    per_rank: tl.constexpr = NUM_EXPERTS // NUM_RANKS
    home_E = e // per_rank
    above_E = tl.zeros_like(rows_E) - mean
    spare_P = tl.zeros_like(p) + mean
    for first in range(0, per_rank, UNROLLED):
        for number in tl.static_range(UNROLLED):
            index_E = home_E * per_rank + first + number
            inside_E = (e < NUM_EXPERTS) & (index_E < (home_E + 1) * per_rank)
            other_E = tl.load(rows_ptr + index_E, mask=inside_E, other=0, volatile=True)
            # A rank's rows, less those of its experts that are larger, or equal and come before this one
            is_before = other_E > rows_E - (index_E < e).to(tl.int32)
            above_E += tl.where(is_before, 0, other_E)
            index_P = p * per_rank + first + number
            inside_P = (p < NUM_RANKS) & (index_P < (p + 1) * per_rank)
            spare_P -= tl.load(rows_ptr + index_P, mask=inside_P, other=0, volatile=True)
    return above_E, spare_P


@QuickLaunch
@triton.jit(do_not_specialize=["least_rows"])
def _plan_kernel(
    counts_ptr,
    experts_ptr,
    ends_ptr,
    places_ptr,
    scratch_ptr,
    least_rows,
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    last_ptr = scratch_ptr + NUM_EXPERTS
    spill_ptr = last_ptr + NUM_EXPERTS
    spare_ptr = spill_ptr + NUM_EXPERTS
    taken_ptr = spare_ptr + NUM_RANKS
    e = tl.arange(0, EXPERTS)
    p = tl.arange(0, RANKS)
    is_expert = e < NUM_EXPERTS
    is_rank = p < NUM_RANKS
    rows_BE = tl.zeros([BLOCK, EXPERTS], tl.int32)
    for first in tl.static_range(0, NUM_RANKS, BLOCK):
        sources = first + tl.arange(0, BLOCK)
        at = counts_ptr + sources[:, None] * NUM_EXPERTS + e[None, :]
        inside = (sources < NUM_RANKS)[:, None] & is_expert[None, :]
        rows_BE += tl.load(at, mask=inside, other=0)
    rows_E = tl.sum(rows_BE, 0)
    tl.store(scratch_ptr + e, rows_E, mask=is_expert)
    last_E = tl.cumsum(rows_E, 0)
    tl.store(last_ptr + e, last_E, mask=is_expert)
    mean = (tl.sum(rows_E, 0) + NUM_RANKS - 1) // NUM_RANKS
    tl.debug_barrier()

    above_E, spare_P = _around_mean(scratch_ptr, rows_E, mean, e, p, NUM_RANKS, NUM_EXPERTS, UNROLLED)
    spill_E = tl.minimum(tl.maximum(above_E, 0), rows_E)
    spill_E = tl.where((spill_E > least_rows) & is_expert, spill_E, 0)
    spare_P = tl.where(is_rank, tl.maximum(spare_P, 0), 0)
    tl.store(spill_ptr + e, spill_E, mask=is_expert)
    tl.store(spare_ptr + p, spare_P, mask=is_rank)
    tl.debug_barrier()
    start_E = _larger_before(spill_E, e, spill_ptr, NUM_EXPERTS, BLOCK)
    start_P = _larger_before(spare_P, p, spare_ptr, NUM_RANKS, BLOCK)

    # The largest pieces of each rank, into one slot after the other
    starts_EP = tl.maximum(start_E[:, None], start_P[None, :])
    left_EP = tl.minimum((start_E + spill_E)[:, None], (start_P + spare_P)[None, :]) - starts_EP
    for slot in tl.static_range(NUM_SLOTS):
        moved_P, taken_P = tl.max(left_EP, 0, return_indices=True)  # the first of those that are equal
        is_moved_P = moved_P > tl.maximum(least_rows, 0)
        left_EP = tl.where(e[:, None] == taken_P[None, :], 0, left_EP)
        at = taken_ptr + p * NUM_SLOTS + slot
        tl.store(at, tl.where(is_moved_P, taken_P, NUM_EXPERTS), mask=is_rank)
        tl.store(at + NUM_RANKS * NUM_SLOTS, tl.where(is_moved_P, moved_P, 0), mask=is_rank)
    tl.debug_barrier()
    _write_homes(ends_ptr, places_ptr, taken_ptr, e, last_E, NUM_RANKS, NUM_EXPERTS, NUM_SLOTS, BLOCK)
    _write_clones(
        experts_ptr, ends_ptr, places_ptr, last_ptr, taken_ptr, NUM_RANKS, NUM_EXPERTS, NUM_SLOTS, SLOTS,
        BLOCK,
    )  # fmt: skip


@triton.jit
def _write_homes(
    ends_ptr, places_ptr, taken_ptr, e, last_E,
    NUM_RANKS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What stays at home of each expert. ``taken_ptr``: experts of slots, in any order within a rank, then
    rows of slots."""
    num_all: tl.constexpr = NUM_RANKS * NUM_SLOTS
    before_BE = tl.zeros([BLOCK, e.shape[0]], tl.int32)
    moved_BE = tl.zeros([BLOCK, e.shape[0]], tl.int32)
    for first in tl.static_range(0, num_all, BLOCK):
        others = first + tl.arange(0, BLOCK)
        taken = tl.load(taken_ptr + others, mask=others < num_all, other=NUM_EXPERTS, volatile=True)[:, None]
        moved = tl.load(taken_ptr + num_all + others, mask=others < num_all, other=0, volatile=True)[:, None]
        before_BE += (taken < e[None, :]).to(tl.int32)
        moved_BE += tl.where(taken == e[None, :], moved, 0)
    at_E = e + tl.sum(before_BE, 0)
    tl.store(ends_ptr + at_E, last_E - tl.sum(moved_BE, 0), mask=e < NUM_EXPERTS)
    place_E = e + e // (NUM_EXPERTS // NUM_RANKS) * NUM_SLOTS
    tl.store(places_ptr + at_E, place_E, mask=e < NUM_EXPERTS)


@triton.jit
def _write_clones(
    experts_ptr, ends_ptr, places_ptr, last_ptr, taken_ptr,
    NUM_RANKS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What clones take over: pieces in the order of experts, ranks and slots. ``taken_ptr``: as above."""
    per_rank: tl.constexpr = NUM_EXPERTS // NUM_RANKS
    num_all: tl.constexpr = NUM_RANKS * NUM_SLOTS
    c = tl.arange(0, SLOTS)
    is_slot = c < num_all
    rank_C = c // NUM_SLOTS
    taken_C = tl.load(taken_ptr + c, mask=is_slot, other=NUM_EXPERTS, volatile=True)
    # Free slots come after all rows.
    last_C = tl.load(last_ptr + tl.minimum(taken_C, NUM_EXPERTS - 1), volatile=True)
    before_BC = tl.zeros([BLOCK, SLOTS], tl.int32)
    after_BC = tl.zeros([BLOCK, SLOTS], tl.int32)
    for first in tl.static_range(0, num_all, BLOCK):
        others = first + tl.arange(0, BLOCK)
        taken = tl.load(taken_ptr + others, mask=others < num_all, other=NUM_EXPERTS, volatile=True)[:, None]
        moved = tl.load(taken_ptr + num_all + others, mask=others < num_all, other=0, volatile=True)[:, None]
        comes_first = (others[:, None] < c[None, :]).to(tl.int32)
        before_BC += (taken < taken_C[None, :] + comes_first).to(tl.int32)
        is_after = (taken == taken_C[None, :]) & (others[:, None] > c[None, :])
        after_BC += tl.where(is_after, moved, 0)
    # Slots of a rank stand in the order of their experts, wherever they stood before.
    placed_C = rank_C * NUM_SLOTS
    for slot in tl.static_range(NUM_SLOTS):
        other = rank_C * NUM_SLOTS + slot
        taken = tl.load(taken_ptr + other, mask=is_slot, other=NUM_EXPERTS, volatile=True)
        placed_C += (taken < taken_C + (other < c).to(tl.int32)).to(tl.int32)
    at_C = tl.minimum(taken_C + 1, NUM_EXPERTS) + tl.sum(before_BC, 0)
    tl.store(ends_ptr + at_C, last_C - tl.sum(after_BC, 0), mask=is_slot)
    tl.store(places_ptr + at_C, placed_C + (rank_C + 1) * per_rank, mask=is_slot)
    tl.store(experts_ptr + placed_C, taken_C, mask=is_slot)


def plan_clones_triton(
    counts_PE: torch.Tensor, num_slots: int, least_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`fsdmoe.kernels.clone_plan.plan_clones`."""
    num_ranks, num_experts = counts_PE.shape
    num_all = num_ranks * num_slots
    experts_PS = counts_PE.new_empty(num_ranks, num_slots)
    ends_F = counts_PE.new_empty(num_experts + num_all)
    places_F = torch.empty_like(ends_F)
    scratch = counts_PE.new_empty(3 * num_experts + num_ranks + 2 * num_all)
    _plan_kernel[(1,)](
        counts_PE.contiguous(), experts_PS, ends_F, places_F, scratch, least_rows, NUM_RANKS=num_ranks,
        NUM_EXPERTS=num_experts, NUM_SLOTS=num_slots, RANKS=max(2, next_power_of_2(num_ranks)),
        EXPERTS=max(2, next_power_of_2(num_experts)), SLOTS=max(2, next_power_of_2(num_all)), BLOCK=_BLOCK,
        UNROLLED=min(8, num_experts // num_ranks), num_warps=_NUM_WARPS,
    )  # fmt: skip
    return experts_PS, ends_F, places_F
