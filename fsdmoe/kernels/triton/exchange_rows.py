"""Rows into other ranks' memory and out of one's own: the four passes of a one-sided exchange.

::

    deliver_rows   each token's row (and its labels) to every rank that needs it   T rows -> others' buffers
    land_rows      what has landed, out of the shared buffer; zeros in free rows   buffer -> R rows
    return_rows    each landed row's result to where its token is kept             R rows -> others' buffers
    sum_returned   a token's results, summed in fp32                               buffer -> T rows

Where things stand is in :class:`fsdmoe.kernels.exchange_plan.Places`. The first and the third write over
the links between GPUs, by a given number of blocks that take tiles of rows in turn, so that the rest of the
GPU stays with compute; the other two are local. Rows are moved as words of 4 bytes, whatever they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.exchange_plan import Places, Who
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2

_TILE_WORDS = 4096
"""Words that a block has under way at a time."""
_MAX_COLUMNS = 2048


class Peers(NamedTuple):
    """One area in every rank's memory."""

    own: torch.Tensor
    """This rank's, bytes."""
    distances: torch.Tensor
    """int64 ``[S]``: from it to every rank's, in units of 16 bytes. An address that is told as a distance is
    known to be aligned, and 16 bytes are written at once."""


@QuickLaunch
@triton.jit(do_not_specialize=["num_tokens"])
def _deliver_kernel(
    x_ptr, labels_ptr, index_ptr, base_ptr, flag_ptr, own_ptr, own_labels_ptr, peers_ptr, label_peers_ptr,
    num_tokens,
    WIDTH: tl.constexpr, LABELS: tl.constexpr, NUM_RANKS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LABEL_COLUMNS: tl.constexpr,
):  # fmt: skip
    unit: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    limit = tl.where(tl.load(flag_ptr) != 0, 0, num_tokens)
    columns = tl.arange(0, COLUMNS)
    label_columns = tl.arange(0, LABEL_COLUMNS)
    for first in range(tl.program_id(0) * ROWS, limit, tl.num_programs(0) * ROWS):
        tokens = first + tl.arange(0, ROWS)
        inside = tokens < limit
        row = tokens.to(tl.int64)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            at = start + columns
            here = inside[:, None] & (at < WIDTH)[None, :]
            values = tl.load(x_ptr + row[:, None] * WIDTH + at[None, :], mask=here)
            for rank in range(NUM_RANKS):
                index = tl.load(index_ptr + row * NUM_RANKS + rank, mask=inside, other=-1)
                place = (index + tl.load(base_ptr + rank)).to(tl.int64) * WIDTH
                needed = (index >= 0)[:, None] & here
                for member in range(MEMBERS):
                    peer_ptr = own_ptr + tl.load(peers_ptr + rank * MEMBERS + member) * unit
                    tl.store(peer_ptr + place[:, None] + at[None, :], values, mask=needed)
        if LABELS > 0:
            here = inside[:, None] & (label_columns < LABELS)[None, :]
            labels = tl.load(labels_ptr + row[:, None] * LABELS + label_columns[None, :], mask=here)
            for rank in range(NUM_RANKS):
                index = tl.load(index_ptr + row * NUM_RANKS + rank, mask=inside, other=-1)
                place = (index + tl.load(base_ptr + rank)).to(tl.int64) * LABELS
                needed = (index >= 0)[:, None] & here
                for member in range(MEMBERS):
                    peer_ptr = own_labels_ptr + tl.load(label_peers_ptr + rank * MEMBERS + member) * 4
                    tl.store(peer_ptr + place[:, None] + label_columns[None, :], labels, mask=needed)


def deliver_rows(
    x_TW: torch.Tensor, labels_TL: torch.Tensor | None, index_TP: torch.Tensor, places: Places,
    peers: Peers, label_peers: Peers, who: Who, blocks: int,
) -> None:  # fmt: skip
    """To the places of the plan, in all ranks' memory."""
    words = as_words(x_TW)
    width, labels = words.shape[1], 0 if labels_TL is None else labels_TL.shape[1]
    if not len(words) or not width:
        return
    rows, columns = _tile(width)
    _deliver_kernel[(min(blocks, cdiv(len(words), rows)),)](
        words, words if labels_TL is None else labels_TL, index_TP, places.base_P, places.flag,
        peers.own.view(words.dtype), label_peers.own.view(torch.int32), peers.distances,
        label_peers.distances, len(words),
        WIDTH=width, LABELS=labels, NUM_RANKS=who.num_ranks, MEMBERS=who.num_members,
        ROWS=rows, COLUMNS=columns, LABEL_COLUMNS=next_power_of_2(max(labels, 1)), num_warps=8,
    )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _land_kernel(
    buffer_ptr, out_ptr, end_ptr, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    landed = (rows < tl.load(end_ptr))[:, None] & (at < WIDTH)[None, :]
    offsets = rows.to(tl.int64)[:, None] * WIDTH + at[None, :]
    values = tl.load(buffer_ptr + offsets, mask=landed, other=0)
    tl.store(out_ptr + offsets, values, mask=(rows < num_rows)[:, None] & (at < WIDTH)[None, :])


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_experts"])
def _land_labels_kernel(
    buffer_ptr, out_ptr, end_ptr, num_rows, first_expert, num_experts,
    LABELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    there = (rows < num_rows)[:, None] & (at < LABELS)[None, :]
    landed = (rows < tl.load(end_ptr))[:, None] & there
    offsets = rows.to(tl.int64)[:, None] * LABELS + at[None, :]
    values = tl.load(buffer_ptr + offsets, mask=landed, other=0)
    ids = values - first_expert
    is_mine = landed & (ids >= 0) & (ids < num_experts)
    is_id = (at >= LABELS // 2)[None, :]
    tl.store(out_ptr + offsets, tl.where(is_id, tl.where(is_mine, ids, -1), values), mask=there)


def land_rows(buffer: torch.Tensor, out_RW: torch.Tensor, places: Places) -> None:
    """The buffer's rows (bytes) into ``out_RW``, zeros where none landed."""
    words = as_words(out_RW)
    width = words.shape[1]
    if words.numel():
        columns = min(next_power_of_2(width), _MAX_COLUMNS)
        rows = max(1, _TILE_WORDS // columns)
        _land_kernel[(cdiv(len(words), rows), cdiv(width, columns))](
            buffer.view(words.dtype), words, places.first_S[-1:], len(words),
            WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=8,
        )  # fmt: skip


def land_labels(
    buffer: torch.Tensor, out_RL: torch.Tensor, places: Places, first_expert: int, num_experts: int
) -> None:
    """The buffer's weights and ids into ``out_RL``: ids as this rank counts its experts, -1 for others and in
    free rows."""
    num_rows, width = out_RL.shape
    if out_RL.numel():
        columns = next_power_of_2(width)
        rows = max(1, 1024 // columns)
        _land_labels_kernel[(cdiv(num_rows, rows),)](
            buffer.view(torch.int32), out_RL, places.first_S[-1:], num_rows, first_expert, num_experts,
            LABELS=width, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


@triton.jit
def _return_part(
    y_ptr, own_ptr, peers_ptr, source_R, place_R, rows, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    unit: tl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
    distance_R = tl.load(peers_ptr + source_R, mask=inside, other=0) * unit
    columns = tl.arange(0, COLUMNS)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        at = start + columns
        here = inside[:, None] & (at < WIDTH)[None, :]
        values = tl.load(y_ptr + rows[:, None] * WIDTH + at[None, :], mask=here)
        offsets = (distance_R + place_R * WIDTH)[:, None] + at[None, :]
        tl.store(own_ptr + offsets, values, mask=here)


@QuickLaunch
@triton.jit(do_not_specialize=["offset"])
def _return_kernel(
    y_ptr, weights_ptr, first_ptr, home_ptr, own_ptr, own_weights_ptr, peers_ptr, weight_peers_ptr, offset,
    WIDTH: tl.constexpr, WEIGHTS: tl.constexpr, NUM_SOURCES: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHT_COLUMNS: tl.constexpr,
):  # fmt: skip
    end = tl.load(first_ptr + NUM_SOURCES)
    lanes = tl.arange(0, LANES)
    last_S = tl.load(first_ptr + 1 + lanes, mask=lanes < NUM_SOURCES, other=2147483647)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < end
        source = tl.sum((last_S[None, :] <= rows[:, None]).to(tl.int32), 1)
        source = tl.where(inside, source, 0)
        place = offset + tl.load(home_ptr + source) + rows - tl.load(first_ptr + source)
        place = place.to(tl.int64)
        if WIDTH > 0:
            _return_part(y_ptr, own_ptr, peers_ptr, source, place, rows.to(tl.int64), inside, WIDTH, COLUMNS)
        if WEIGHTS > 0:
            _return_part(
                weights_ptr, own_weights_ptr, weight_peers_ptr, source, place, rows.to(tl.int64), inside,
                WEIGHTS, WEIGHT_COLUMNS,
            )  # fmt: skip


def return_rows(
    y_RW: torch.Tensor | None, weights_RK: torch.Tensor | None, places: Places, peers: Peers,
    weight_peers: Peers, offset: int, who: Who, blocks: int,
) -> None:  # fmt: skip
    """Home, to ``offset`` (this ETP member's) of what the senders keep."""
    words = None if y_RW is None else as_words(y_RW)
    weights = None if weights_RK is None else as_words(weights_RK)
    some = words if words is not None else weights
    if some is None:
        return
    width, num_weights = (0 if part is None else part.shape[1] for part in (words, weights))
    rows, columns = _tile(max(width, 1))
    _return_kernel[(min(blocks, cdiv(max(len(some), 1), rows)),)](
        some if words is None else words, some if weights is None else weights, places.first_S, places.home_S,
        peers.own.view(some.dtype if words is None else words.dtype), weight_peers.own.view(torch.int32),
        peers.distances, weight_peers.distances, offset,
        WIDTH=width, WEIGHTS=num_weights, NUM_SOURCES=who.num_sources,
        LANES=max(2, next_power_of_2(who.num_sources)), ROWS=rows, COLUMNS=columns,
        WEIGHT_COLUMNS=next_power_of_2(max(num_weights, 1)), num_warps=8,
    )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["num_kept"])
def _sum_kernel(
    buffer_ptr, out_ptr, index_ptr, start_ptr, flag_ptr, num_kept,
    WIDTH: tl.constexpr, NUM_RANKS: tl.constexpr, MEMBERS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for rank in range(NUM_RANKS):
        index = tl.load(index_ptr + token * NUM_RANKS + rank)
        limit = tl.where(index >= 0, WIDTH, 0)
        for member in range(MEMBERS):
            place = (member * num_kept + tl.load(start_ptr + rank) + index).to(tl.int64)
            here = tl.load(buffer_ptr + place * WIDTH + at, mask=at < limit, other=0.0)
            total += here.to(tl.float32)
    # Nothing came back where something did not fit: make that NaN instead of training on it.
    total = tl.where(tl.load(flag_ptr) != 0, float("nan"), total)
    tl.store(out_ptr + token * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


def sum_returned(
    buffer: torch.Tensor,
    out_TW: torch.Tensor,
    index_TP: torch.Tensor,
    places: Places,
    num_kept: int,
    who: Who,
) -> None:
    """Each token's results into ``out_TW``; NaN where the flag is raised. ``num_kept``: rows that a rank
    keeps for each ETP member."""
    num_tokens, width = out_TW.shape
    if out_TW.numel():
        columns = min(next_power_of_2(width), _MAX_COLUMNS)
        _sum_kernel[(num_tokens, cdiv(width, columns))](
            buffer.view(out_TW.dtype), out_TW, index_TP, places.start_P, places.flag, num_kept,
            WIDTH=width, NUM_RANKS=who.num_ranks, MEMBERS=who.num_members, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


def as_words(x_RW: torch.Tensor) -> torch.Tensor:
    """The same bytes, contiguous, in 4-byte words where rows are a multiple of them."""
    x_RW = x_RW.contiguous()
    if x_RW.shape[1] * x_RW.element_size() % 4 == 0:
        return x_RW.view(torch.int32)
    return x_RW.view(torch.uint8)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = min(next_power_of_2(width), _MAX_COLUMNS)
    return max(1, min(_TILE_WORDS // columns, 64)), columns
