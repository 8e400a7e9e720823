"""The plan of a one-sided exchange: rows counted and indexed, counts written to all ranks, and a barrier.

Every rank has a table for everybody's counts and a signal pad with a number for each rank, both in memory
that the others can write to. At a barrier a rank writes the number of the barrier to its place in all pads,
and waits until all places of its own pad say so: what others wrote before their signal can be read after it.
Barriers are counted on the device, so a captured graph can be replayed. A rank that does not come within the
time limit is noted, and from then on nobody waits.

The sums are :func:`fsdmoe.kernels.exchange_plan.places_of`, in one program. Two tables take turns: a rank can
be one barrier ahead of another, never two. Before that, clones of experts are planned from other tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from fsdmoe.kernels.exchange_plan import Bounds, Notes, Places, Who
from fsdmoe.kernels.triton.launch import QuickLaunch, next_power_of_2

_CHOICES = 8192  # that are looked at together


@QuickLaunch
@triton.jit(do_not_specialize=["num_tokens", "num_ids", "per_rank"])
def _index_kernel(
    ids_ptr,
    index_ptr,
    routes_ptr,
    counts_ptr,
    num_tokens,
    num_ids,
    per_rank,
    NUM_RANKS: tl.constexpr,
    COPIES: tl.constexpr,
    CHUNK: tl.constexpr,
    IDS: tl.constexpr,
):
    rank = tl.program_id(0)
    first_expert = rank * per_rank
    num_rows = tl.zeros([], tl.int32)
    num_pairs = tl.zeros([], tl.int32)
    for first in range(0, num_tokens, CHUNK):
        tokens = first + tl.arange(0, CHUNK)
        inside = tokens < num_tokens
        choices = tl.arange(0, IDS)
        at = tokens.to(tl.int64)[:, None] * num_ids + choices[None, :]
        ids = tl.load(ids_ptr + at, mask=inside[:, None] & (choices < num_ids)[None, :], other=-1)
        found = tl.sum(((ids >= first_expert) & (ids < first_expert + per_rank)).to(tl.int32), 1)
        needed = (found > 0).to(tl.int32)
        index = num_rows + tl.cumsum(needed, 0) - 1
        place = tokens.to(tl.int64) * NUM_RANKS + rank
        tl.store(index_ptr + place, tl.where(needed > 0, index, -1), mask=inside)
        route_ptr = routes_ptr + tokens.to(tl.int64) * COPIES * 2
        if COPIES == NUM_RANKS:
            tl.store(route_ptr + rank * 2, tl.where(needed > 0, rank, -1), mask=inside)
            tl.store(route_ptr + rank * 2 + 1, tl.where(needed > 0, index, -1), mask=inside)
        else:
            # Each choice of this rank is its program's to write; those of no rank are the first one's.
            found = tl.zeros([CHUNK], tl.int32)
            for choice in range(num_ids):
                chosen = tl.load(ids_ptr + tokens.to(tl.int64) * num_ids + choice, mask=inside, other=-1)
                is_mine = (chosen >= first_expert) & (chosen < first_expert + per_rank)
                is_first = is_mine & (found == 0)
                is_written = is_mine | (tl.where(rank == 0, chosen, 0) < 0)
                tl.store(route_ptr + choice * 2, tl.where(is_first, rank, -1), mask=inside & is_written)
                tl.store(route_ptr + choice * 2 + 1, tl.where(is_first, index, -1), mask=inside & is_written)
                found += is_mine.to(tl.int32)
        num_rows += tl.sum(needed, 0)
        num_pairs += tl.sum(found, 0)
    tl.store(counts_ptr + rank, num_rows)
    tl.store(counts_ptr + NUM_RANKS + rank, num_pairs)
    if rank == 0:
        tl.store(counts_ptr + 2 * NUM_RANKS, num_tokens)
        tl.store(counts_ptr + 2 * NUM_RANKS + 1, num_ids)


def index_rows_triton(
    ids_TK: torch.Tensor, num_ranks: int, experts_per_rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`fsdmoe.kernels.send_order.index_rows`."""
    num_tokens, num_ids = ids_TK.shape
    index_TP = torch.empty(num_tokens, num_ranks, device=ids_TK.device, dtype=torch.int32)
    copies = min(num_ids, num_ranks)
    routes_TC2 = torch.empty(num_tokens, copies, 2, device=ids_TK.device, dtype=torch.int32)
    counts_C = torch.empty(2 * num_ranks + 2, device=ids_TK.device, dtype=torch.int32)
    ids = next_power_of_2(num_ids)
    _index_kernel[(num_ranks,)](
        ids_TK.contiguous(), index_TP, routes_TC2, counts_C, num_tokens, num_ids, experts_per_rank,
        NUM_RANKS=num_ranks, COPIES=copies, CHUNK=max(_CHOICES // ids, 16), IDS=ids, num_warps=8,
    )  # fmt: skip
    return index_TP, routes_TC2, counts_C


class Barrier(NamedTuple):
    """What ranks wait for each other with; tensors on the device."""

    pads: torch.Tensor
    """int64: the address of every rank's pad."""
    own_pad: torch.Tensor
    """int32 ``[S]``."""
    number: torch.Tensor
    """int32 ``[1]``: of the last barrier."""
    missing: torch.Tensor
    """int32 ``[1]``: 0, or 1 + a rank that did not come."""
    source: int
    num_sources: int
    limit_ns: int


@triton.jit
def _wait_for_all(pads_ptr, own_pad_ptr, missing_ptr, number, source, limit_ns, NUM_SOURCES: tl.constexpr):
    """1 + a rank that did not come, or 0."""
    tl.debug_barrier()  # what this program wrote comes before its signals
    for peer in range(NUM_SOURCES):
        pad_ptr = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pad_ptr + source, number, sem="release", scope="sys")
    began = globaltimer()
    late = tl.load(missing_ptr)
    for peer in range(NUM_SOURCES):
        seen = tl.atomic_add(own_pad_ptr + peer, 0, sem="acquire", scope="sys")
        while (seen - number < 0) & (late == 0):
            seen = tl.atomic_add(own_pad_ptr + peer, 0, sem="acquire", scope="sys")
            if globaltimer() - began > limit_ns:
                late = peer + 1
    tl.store(missing_ptr, late)
    tl.debug_barrier()
    return late


@QuickLaunch
@triton.jit(do_not_specialize=["source", "limit_ns"])
def _barrier_kernel(
    pads_ptr, own_pad_ptr, number_ptr, missing_ptr, source, limit_ns,
    NUM_SOURCES: tl.constexpr,
):  # fmt: skip
    number = tl.load(number_ptr) + 1
    _wait_for_all(pads_ptr, own_pad_ptr, missing_ptr, number, source, limit_ns, NUM_SOURCES)
    tl.store(number_ptr, number)


def wait_for_all(barrier: Barrier) -> None:
    """Returns at once; what is launched after it runs once all ranks have come."""
    _barrier_kernel[(1,)](
        barrier.pads, barrier.own_pad, barrier.number, barrier.missing, barrier.source, barrier.limit_ns,
        NUM_SOURCES=barrier.num_sources, num_warps=1,
    )  # fmt: skip


@QuickLaunch
@triton.jit(
    do_not_specialize=[
        "source", "ep_rank", "limit_ns", "max_tokens", "max_ids", "max_rows", "max_pairs", "raises"
    ]
)  # fmt: skip
def _gather_counts_kernel(
    counts_ptr, tables_ptr, own_table_ptr, pads_ptr, own_pad_ptr, number_ptr, missing_ptr, places_ptr,
    flag_ptr, fill_ptr, source, ep_rank, limit_ns, max_tokens, max_ids, max_rows, max_pairs, raises,
    NUM_SOURCES: tl.constexpr, NUM_RANKS: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    num_counts: tl.constexpr = 2 * NUM_RANKS + 2
    number = tl.load(number_ptr) + 1
    half = (number & 1) * NUM_SOURCES * num_counts
    columns = tl.arange(0, COUNTS)
    counts = tl.load(counts_ptr + columns, mask=columns < num_counts, other=0)
    for peer in range(NUM_SOURCES):
        table_ptr = tl.load(tables_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(table_ptr + half + source * num_counts + columns, counts, mask=columns < num_counts)
    late = _wait_for_all(pads_ptr, own_pad_ptr, missing_ptr, number, source, limit_ns, NUM_SOURCES)
    tl.store(number_ptr, number)

    lanes = tl.arange(0, LANES)
    ranks = tl.arange(0, RANKS)
    inside = (lanes < NUM_SOURCES)[:, None] & (ranks < NUM_RANKS)[None, :]
    line_S = own_table_ptr + half + lanes * num_counts
    at = line_S[:, None] + ranks[None, :]
    rows_SP = tl.load(at, mask=inside, other=0, volatile=True)
    pairs_SP = tl.load(at + NUM_RANKS, mask=inside, other=0, volatile=True)
    tokens_S = tl.load(line_S + 2 * NUM_RANKS, mask=lanes < NUM_SOURCES, other=0, volatile=True)
    ids_S = tl.load(line_S + 2 * NUM_RANKS + 1, mask=lanes < NUM_SOURCES, other=0, volatile=True)

    received_P = tl.sum(rows_SP, 0)
    computed_P = tl.sum(pairs_SP, 0)
    over = (tl.max(received_P, 0) > max_rows) | (tl.max(computed_P, 0) > max_pairs)
    over = over | (tl.max(tokens_S, 0) > max_tokens) | (tl.max(ids_S, 0) > max_ids) | (late != 0)
    base_P = tl.sum(tl.where((lanes < source)[:, None], rows_SP, 0), 0)
    before_SP = tl.cumsum(rows_SP, 1) - rows_SP
    start_P = tl.sum(tl.where((lanes == source)[:, None], before_SP, 0), 0)
    mine_S = tl.sum(tl.where((ranks == ep_rank)[None, :], rows_SP, 0), 1)
    home_S = tl.sum(tl.where((ranks == ep_rank)[None, :], before_SP, 0), 1)
    last_S = tl.where(over, 0, tl.cumsum(mine_S, 0))

    tl.store(places_ptr + ranks, base_P, mask=ranks < NUM_RANKS)
    tl.store(places_ptr + NUM_RANKS + ranks, start_P, mask=ranks < NUM_RANKS)
    first_ptr = places_ptr + 2 * NUM_RANKS
    tl.store(first_ptr, 0)
    tl.store(first_ptr + 1 + lanes, last_S, mask=lanes < NUM_SOURCES)
    tl.store(first_ptr + 1 + NUM_SOURCES + lanes, home_S, mask=lanes < NUM_SOURCES)
    tl.store(first_ptr + 1 + 2 * NUM_SOURCES, over.to(tl.int32))
    tl.store(flag_ptr, tl.maximum(tl.load(flag_ptr), over.to(tl.int32) * raises))
    received = tl.sum(tl.where(ranks == ep_rank, received_P, 0), 0).to(tl.float32)
    computed = tl.sum(tl.where(ranks == ep_rank, computed_P, 0), 0).to(tl.float32)
    fill = tl.maximum(received / max_rows, computed / max_pairs)
    tl.store(fill_ptr, tl.maximum(tl.load(fill_ptr), fill))


def gather_counts(
    counts_C: torch.Tensor,
    tables: torch.Tensor,
    own_table: torch.Tensor,
    barrier: Barrier,
    notes: Notes,
    bounds: Bounds,
    who: Who,
    raises: bool,
) -> Places:
    """Counts to all ranks, and the places that follow from everybody's. ``tables``: the address of every
    rank's table, int32 ``[2, S, C]``."""
    numbers = counts_C.new_empty(sum(Places.sizes(who.num_ranks, who.num_sources)))
    _gather_counts_kernel[(1,)](
        counts_C, tables, own_table, barrier.pads, barrier.own_pad, barrier.number, barrier.missing,
        numbers, notes.flag, notes.fill, who.source, who.ep_rank, barrier.limit_ns, bounds.tokens,
        bounds.num_ids, bounds.rows, bounds.pairs, int(raises), NUM_SOURCES=who.num_sources,
        NUM_RANKS=who.num_ranks, LANES=max(2, next_power_of_2(who.num_sources)),
        RANKS=next_power_of_2(who.num_ranks), COUNTS=next_power_of_2(who.num_counts), num_warps=1,
    )  # fmt: skip
    return Places.of(numbers, who.num_ranks, who.num_sources)


@QuickLaunch
@triton.jit(do_not_specialize=["source", "limit_ns", "half_size"])
def _gather_loads_kernel(
    ends_ptr, tables_ptr, own_table_ptr, pads_ptr, own_pad_ptr, number_ptr, missing_ptr, out_ptr, source,
    limit_ns, half_size,
    NUM_SOURCES: tl.constexpr, NUM_EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.load(number_ptr) + 1
    half = (number & 1) * half_size
    columns = tl.arange(0, COLUMNS)
    inside = columns < NUM_EXPERTS
    counts = tl.load(ends_ptr + columns, mask=inside, other=0)
    counts -= tl.load(ends_ptr + columns - 1, mask=inside & (columns > 0), other=0)
    for peer in range(NUM_SOURCES):
        table_ptr = tl.load(tables_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(table_ptr + half + source * NUM_EXPERTS + columns, counts, mask=inside)
    _wait_for_all(pads_ptr, own_pad_ptr, missing_ptr, number, source, limit_ns, NUM_SOURCES)
    tl.store(number_ptr, number)
    for peer in range(NUM_SOURCES):
        line = tl.load(own_table_ptr + half + peer * NUM_EXPERTS + columns, mask=inside, volatile=True)
        tl.store(out_ptr + peer * NUM_EXPERTS + columns, line, mask=inside)


def gather_loads(
    ends_E: torch.Tensor, tables: torch.Tensor, own_table: torch.Tensor, barrier: Barrier,
    out_SE: torch.Tensor,
) -> None:  # fmt: skip
    """Everybody's rows for each expert into ``out_SE``, int32, from where each expert's end in the order of
    experts. ``tables``: the address of every rank's table, whose halves take turns."""
    num_sources, num_experts = out_SE.shape
    _gather_loads_kernel[(1,)](
        ends_E, tables, own_table, barrier.pads, barrier.own_pad, barrier.number, barrier.missing, out_SE,
        barrier.source, barrier.limit_ns, len(own_table) // 2, NUM_SOURCES=num_sources,
        NUM_EXPERTS=num_experts, COLUMNS=max(2, next_power_of_2(num_experts)), num_warps=1,
    )  # fmt: skip
