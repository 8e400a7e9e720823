"""Which experts are cloned where, in one program: see ``fsdmoe/kernels/clone_plan.py``.

Prefix sums over pieces in descending order need no sort: a piece begins where the larger ones end, so it is
compared with all others, a block of them at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, next_power_of_2

_BLOCK = 32  # what is compared with at a time


@triton.jit
def _larger_before(values, numbers, groups, values_ptr, groups_of, count, BLOCK: tl.constexpr):
    """For each value the sum of those in its group that are larger, or equal and come before it.

    They are read back from ``values_ptr``; a group is ``groups_of`` values that follow one another."""
    tl.store(values_ptr + numbers, values, mask=numbers < count)
    tl.debug_barrier()
    total = tl.zeros_like(values)
    for first in range(0, count, BLOCK):
        others = first + tl.arange(0, BLOCK)
        other = tl.load(values_ptr + others, mask=others < count, other=0, volatile=True)[None, :]
        mine = values[:, None]
        is_before = (other > mine) | ((other == mine) & (others[None, :] < numbers[:, None]))
        is_before = is_before & ((others // groups_of)[None, :] == groups[:, None])
        total += tl.sum(tl.where(is_before, other, 0), 1)
    tl.debug_barrier()
    return total


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
):
    per_rank: tl.constexpr = NUM_EXPERTS // NUM_RANKS
    e = tl.arange(0, EXPERTS)
    p = tl.arange(0, RANKS)
    is_expert = e < NUM_EXPERTS
    is_rank = p < NUM_RANKS
    rows_E = tl.zeros([EXPERTS], tl.int32)
    for first in tl.static_range(0, NUM_RANKS, BLOCK):
        sources = first + tl.arange(0, BLOCK)
        at = counts_ptr + sources[:, None] * NUM_EXPERTS + e[None, :]
        inside = (sources < NUM_RANKS)[:, None] & is_expert[None, :]
        rows_E += tl.sum(tl.load(at, mask=inside, other=0), 0)
    home_E = e // per_rank
    last_E = tl.cumsum(rows_E, 0)
    mean = (tl.sum(rows_E, 0) + NUM_RANKS - 1) // NUM_RANKS

    # What is above the mean, and what below it
    before_E = _larger_before(rows_E, e, home_E, scratch_ptr, per_rank, NUM_EXPERTS, BLOCK)
    tl.store(scratch_ptr + e, last_E, mask=is_expert)
    tl.debug_barrier()
    last_P = tl.load(scratch_ptr + (p + 1) * per_rank - 1, mask=is_rank, other=0, volatile=True)
    first_P = tl.load(scratch_ptr + p * per_rank - 1, mask=is_rank & (p > 0), other=0, volatile=True)
    first_E = tl.load(
        scratch_ptr + home_E * per_rank - 1, mask=is_expert & (home_E > 0), other=0, volatile=True
    )
    end_E = tl.load(scratch_ptr + (home_E + 1) * per_rank - 1, mask=is_expert, other=0, volatile=True)
    tl.debug_barrier()
    above_E = end_E - first_E - mean - before_E
    spill_E = tl.minimum(tl.maximum(above_E, 0), rows_E)
    spill_E = tl.where(spill_E > least_rows, spill_E, 0)
    spare_P = tl.where(is_rank, tl.maximum(mean - (last_P - first_P), 0), 0)
    start_E = _larger_before(spill_E, e, e * 0, scratch_ptr, NUM_EXPERTS, NUM_EXPERTS, BLOCK)
    start_P = _larger_before(spare_P, p, p * 0, scratch_ptr, NUM_RANKS, NUM_RANKS, BLOCK)

    # The largest pieces of each rank, into one slot after the other
    starts_EP = tl.maximum(start_E[:, None], start_P[None, :])
    left_EP = tl.minimum((start_E + spill_E)[:, None], (start_P + spare_P)[None, :]) - starts_EP
    for slot in tl.static_range(NUM_SLOTS):
        moved_P = tl.max(left_EP, 0)
        is_moved_P = moved_P > tl.maximum(least_rows, 0)
        is_largest_EP = left_EP == moved_P[None, :]
        taken_P = tl.min(tl.where(is_largest_EP, e[:, None], EXPERTS), 0)
        left_EP = tl.where(e[:, None] == taken_P[None, :], 0, left_EP)
        at = scratch_ptr + NUM_EXPERTS + p * NUM_SLOTS + slot
        tl.store(at, tl.where(is_moved_P, taken_P, NUM_EXPERTS), mask=is_rank)
        tl.store(at + NUM_RANKS * NUM_SLOTS, tl.where(is_moved_P, moved_P, 0), mask=is_rank)
    tl.store(scratch_ptr + e, last_E, mask=is_expert)
    tl.debug_barrier()
    _write_pieces(
        experts_ptr, ends_ptr, places_ptr, scratch_ptr, last_E, NUM_RANKS, NUM_EXPERTS, NUM_SLOTS, EXPERTS,
        SLOTS, BLOCK,
    )  # fmt: skip


@triton.jit
def _write_pieces(
    experts_ptr, ends_ptr, places_ptr, scratch_ptr, last_E,
    NUM_RANKS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pieces in the order of experts, ranks and slots. ``scratch_ptr``: where the rows of each expert end,
    then experts of slots, in any order within a rank, then rows of slots."""
    per_rank: tl.constexpr = NUM_EXPERTS // NUM_RANKS
    num_all: tl.constexpr = NUM_RANKS * NUM_SLOTS
    e = tl.arange(0, EXPERTS)
    c = tl.arange(0, SLOTS)
    taken_ptr = scratch_ptr + NUM_EXPERTS
    taken_C = tl.load(taken_ptr + c, mask=c < num_all, other=NUM_EXPERTS, volatile=True)
    is_clone = taken_C < NUM_EXPERTS
    last_C = tl.load(scratch_ptr + taken_C, mask=is_clone, other=0, volatile=True)
    last_C = tl.where(is_clone, last_C, tl.max(last_E, 0))
    before_E = tl.zeros([EXPERTS], tl.int32)
    moved_E = tl.zeros([EXPERTS], tl.int32)
    before_C = tl.zeros([SLOTS], tl.int32)
    after_C = tl.zeros([SLOTS], tl.int32)
    slot_C = tl.zeros([SLOTS], tl.int32)
    for first in range(0, num_all, BLOCK):
        others = first + tl.arange(0, BLOCK)
        taken = tl.load(taken_ptr + others, mask=others < num_all, other=NUM_EXPERTS + 1, volatile=True)[
            None, :
        ]
        moved = tl.load(taken_ptr + num_all + others, mask=others < num_all, other=0, volatile=True)[None, :]
        before_E += tl.sum((taken < e[:, None]).to(tl.int32), 1)
        moved_E += tl.sum(tl.where(taken == e[:, None], moved, 0), 1)
        is_same = taken == taken_C[:, None]
        is_earlier = others[None, :] < c[:, None]
        comes_before = (taken < taken_C[:, None]) | (is_same & is_earlier)
        before_C += tl.sum(comes_before.to(tl.int32), 1)
        after_C += tl.sum(tl.where(is_same & (others[None, :] > c[:, None]), moved, 0), 1)
        is_neighbour = (others // NUM_SLOTS)[None, :] == (c // NUM_SLOTS)[:, None]
        slot_C += tl.sum((comes_before & is_neighbour).to(tl.int32), 1)
    tl.store(ends_ptr + e + before_E, last_E - moved_E, mask=e < NUM_EXPERTS)
    tl.store(places_ptr + e + before_E, e + e // per_rank * NUM_SLOTS, mask=e < NUM_EXPERTS)
    at_C = tl.minimum(taken_C + 1, NUM_EXPERTS) + before_C
    rank_C = c // NUM_SLOTS
    tl.store(ends_ptr + at_C, last_C - after_C, mask=c < num_all)
    # Slots of a rank stand in the order of their experts, wherever they stood before.
    placed_C = rank_C * NUM_SLOTS + slot_C
    tl.store(places_ptr + at_C, placed_C + (rank_C + 1) * per_rank, mask=c < num_all)
    tl.store(experts_ptr + placed_C, taken_C, mask=c < num_all)


def plan_clones_triton(
    counts_PE: torch.Tensor, num_slots: int, least_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`fsdmoe.kernels.clone_plan.plan_clones`."""
    num_ranks, num_experts = counts_PE.shape
    num_all = num_ranks * num_slots
    experts_PS = counts_PE.new_empty(num_ranks, num_slots)
    ends_F = counts_PE.new_empty(num_experts + num_all)
    places_F = torch.empty_like(ends_F)
    _plan_kernel[(1,)](
        counts_PE.contiguous(), experts_PS, ends_F, places_F, counts_PE.new_empty(num_experts + 2 * num_all),
        least_rows, NUM_RANKS=num_ranks, NUM_EXPERTS=num_experts, NUM_SLOTS=num_slots,
        RANKS=max(2, next_power_of_2(num_ranks)), EXPERTS=max(2, next_power_of_2(num_experts)),
        SLOTS=max(2, next_power_of_2(num_all)), BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return experts_PS, ends_F, places_F
