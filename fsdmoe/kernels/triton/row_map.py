"""Where each assignment's row stands once rows are sorted by expert, found without waiting for the device.

    ids_RK      row r, choice k  ->  expert, or -1 (not computed here)
    sorted rows |  expert 0 ......... pad | expert 1 .... pad | ... | unused up to the capacity |
    offsets     0                         ^offsets[1]         ^offsets[2]

Each expert's segment is padded to a multiple of ``align`` rows, so that a GEMM tile never spans two
experts; an expert without rows keeps one tile of padding (its weight gradient is then a product with zeros,
no special case). The buffers are sized for the worst case, so their size depends on shapes alone and a CUDA
graph can replay them. Order within an expert is that of the assignments: results do not change from run to
run.

Two launches: every program counts its assignments per expert, then every program adds up the counts before
its own and hands out places. Sizes: R rows, K choices a row, E experts, M sorted rows (the capacity).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2

# More programs than this make the second launch read a long table of counts; fewer leave multiprocessors
# idle.
_MAX_PROGRAMS = 256
# Assignments ranked at once, each against all others of the chunk.
_CHUNK = tl.constexpr(128)
# Counts that one program reads of the table at a time: what its registers hold.
_TABLE_ELEMENTS = 8192
_MIN_BINS = 32


class RowMap(NamedTuple):
    """The permutation; a tuple of tensors, so that it can be saved for backward as it is."""

    position_RK: torch.Tensor
    """int32: the sorted row of each assignment, -1 where the expert is not computed here."""
    source_M: torch.Tensor
    """int32: the assignment ``r * K + k`` of each sorted row, -1 for padding; undefined past the last."""
    offsets: torch.Tensor
    """int32 [E + 2]: where padded segments start, where the last ends, and 1 if the capacity was exceeded."""
    counts_E: torch.Tensor
    """int32: rows of each expert, padding left out."""
    tile_expert: torch.Tensor
    """int32 [M / align]: the expert that a tile of ``align`` rows belongs to."""
    order_E: torch.Tensor
    """int32: experts by their rows, the busiest first; of equal ones the first."""

    @property
    def capacity(self) -> int:
        return self.source_M.shape[0]

    @property
    def top_k(self) -> int:
        return self.position_RK.shape[1]

    @property
    def num_experts(self) -> int:
        return self.counts_E.shape[0]


class GatheredRows(NamedTuple):
    """Rows that a product fetches through the map, instead of from a permuted copy. Where they are multiplied
    by a weight, their width must be a multiple of the tile's depth."""

    x_RD: torch.Tensor


def capacity_of(num_assignments: int, num_experts: int, align: int) -> int:
    """Sorted rows that suffice however the assignments fall: no expert wastes more than one tile."""
    return num_assignments // align * align + num_experts * align


@triton.jit
def _load_experts(ids_ptr, at, num_assignments, NUM_EXPERTS: tl.constexpr):
    experts = tl.load(ids_ptr + at, mask=at < num_assignments, other=-1).to(tl.int32)
    return tl.where(experts < NUM_EXPERTS, experts, -1)


@QuickLaunch
@triton.jit(do_not_specialize=["num_assignments", "num_chunks"])
def _count_kernel(
    ids_ptr,
    table_ptr,
    num_assignments,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    program = tl.program_id(0)
    counts = tl.zeros([EXPERTS], tl.int32)
    for chunk in range(num_chunks):
        at = (program * num_chunks + chunk) * _CHUNK + tl.arange(0, _CHUNK)
        chosen = _load_experts(ids_ptr, at, num_assignments, NUM_EXPERTS)
        counts += tl.histogram(chosen, EXPERTS, mask=chosen >= 0)
    tl.store(table_ptr + program * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def _describe_segment(
    source_ptr, tile_expert_ptr, start, count, padded, expert, capacity, ALIGN: tl.constexpr
):
    """Flag one expert's padding rows and name the expert in its tiles."""
    tail = start + count + tl.arange(0, ALIGN)
    is_padding = (tail < start + padded) & (tail < capacity)
    tl.store(source_ptr + tail, tl.full([ALIGN], -1, tl.int32), mask=is_padding)
    first = start // ALIGN
    num_tiles = padded // ALIGN
    for done in range(0, num_tiles, 64):
        tiles = done + tl.arange(0, 64)
        inside = (tiles < num_tiles) & ((first + tiles) * ALIGN < capacity)
        tl.store(tile_expert_ptr + first + tiles, tl.zeros([64], tl.int32) + expert, mask=inside)


@QuickLaunch
@triton.jit(do_not_specialize=["num_assignments", "num_chunks", "num_programs", "capacity"])
def _place_kernel(
    ids_ptr,
    table_ptr,
    position_ptr,
    source_ptr,
    offsets_ptr,
    counts_ptr,
    tile_expert_ptr,
    order_ptr,
    num_assignments,
    num_chunks,
    num_programs,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    TILED: tl.constexpr,
):
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_programs, TABLE_ROWS):
        others = first + tl.arange(0, TABLE_ROWS)
        table = tl.load(
            table_ptr + others[:, None] * EXPERTS + experts[None, :],
            mask=(others < num_programs)[:, None],
            other=0,
        )
        counts += tl.sum(table, 0)
        before += tl.sum(tl.where((others < program)[:, None], table, 0), 0)
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    if TILED:
        padded = tl.maximum(padded, ALIGN)
    padded = tl.where(experts < NUM_EXPERTS, padded, 0)
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    if program == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + experts, tl.minimum(ends, capacity), mask=experts < NUM_EXPERTS)
        tl.store(offsets_ptr + NUM_EXPERTS + 1, (tl.max(ends, 0) > capacity).to(tl.int32))
        tl.store(counts_ptr + experts, counts, mask=experts < NUM_EXPERTS)
    if TILED and program < NUM_EXPERTS:
        mine = experts == program
        count = tl.sum(tl.where(mine, counts, 0), 0)
        is_before = (counts > count) | ((counts == count) & (experts < program))
        rank = tl.sum((is_before & (experts < NUM_EXPERTS)).to(tl.int32), 0)
        tl.store(order_ptr + rank, program)
        _describe_segment(
            source_ptr,
            tile_expert_ptr,
            tl.sum(tl.where(mine, starts, 0), 0),
            count,
            tl.sum(tl.where(mine, padded, 0), 0),
            program,
            capacity,
            ALIGN,
        )
    next_free = starts + before
    order = tl.arange(0, _CHUNK)
    for chunk in range(num_chunks):
        at = (program * num_chunks + chunk) * _CHUNK + order
        chosen = _load_experts(ids_ptr, at, num_assignments, NUM_EXPERTS)
        earlier = (chosen[:, None] == chosen[None, :]) & (order[None, :] < order[:, None])
        place = tl.gather(next_free, tl.maximum(chosen, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
        placed = (chosen >= 0) & (place < capacity)
        tl.store(position_ptr + at, tl.where(placed, place, -1), mask=at < num_assignments)
        tl.store(source_ptr + place, at, mask=placed)
        next_free += tl.histogram(chosen, EXPERTS, mask=chosen >= 0)


def build_row_map(
    ids_RK: torch.Tensor, num_experts: int, *, align: int, max_rows: int | None = None
) -> RowMap:
    """Sort assignments by expert.

    ``max_rows`` bounds how many assignments are not -1 where the caller knows it (else: all of them);
    should the bound prove too small, rows are left out and the map says so in ``offsets[-1]``.
    """
    num_assignments = ids_RK.numel()
    bound = num_assignments if max_rows is None else min(max_rows, num_assignments)
    row_map = _empty_map(ids_RK, num_experts, capacity_of(bound, num_experts, align), align)
    _fill(row_map, ids_RK, align=align, tiled=True)
    return row_map


def build_group_map(ids_RK: torch.Tensor, num_groups: int) -> RowMap:
    """Sort assignments by group where no tile follows: groups are not padded, the tail of ``source_M`` is -1,
    and ``tile_expert`` and ``order_E`` are left out."""
    capacity = ids_RK.numel()
    row_map = _empty_map(ids_RK, num_groups, capacity, max(capacity, 1))
    row_map.source_M.fill_(-1)
    _fill(row_map, ids_RK, align=1, tiled=False)
    return row_map


def _empty_map(ids_RK: torch.Tensor, num_experts: int, capacity: int, rows_a_tile: int) -> RowMap:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=ids_RK.device, dtype=torch.int32)

    return RowMap(
        position_RK=empty(*ids_RK.shape),
        source_M=empty(capacity),
        offsets=empty(num_experts + 2),
        counts_E=empty(num_experts),
        tile_expert=empty(capacity // rows_a_tile),
        order_E=empty(num_experts),
    )


def _fill(row_map: RowMap, ids_RK: torch.Tensor, *, align: int, tiled: bool) -> None:
    num_assignments, num_experts = ids_RK.numel(), row_map.num_experts
    num_chunks = max(1, cdiv(num_assignments, _CHUNK.value * _MAX_PROGRAMS))
    num_programs = max(1, cdiv(num_assignments, _CHUNK.value * num_chunks))
    experts = max(_MIN_BINS, next_power_of_2(num_experts))
    table = torch.empty(num_programs, experts, device=ids_RK.device, dtype=torch.int32)
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS": experts, "num_warps": 4}
    _count_kernel[(num_programs,)](ids_RK, table, num_assignments, num_chunks, **sizes)
    _place_kernel[(max(num_programs, num_experts),)](
        ids_RK,
        table,
        *row_map,
        num_assignments,
        num_chunks,
        num_programs,
        row_map.capacity,
        **sizes,
        TABLE_ROWS=max(1, _TABLE_ELEMENTS // experts),
        ALIGN=align,
        TILED=tiled,
    )
