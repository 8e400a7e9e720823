"""Rows into other ranks' memory and out of one's own: the four passes of a one-sided exchange.

::

    deliver_rows   each token's row (and its labels) to every rank that needs it   T rows -> others' buffers
    land_rows      what has landed, out of the shared buffer; zeros in free rows   buffer -> R rows
    return_rows    each landed row's result to where its token is kept             R rows -> others' buffers
    sum_returned   a token's results, summed in fp32                               buffer -> T rows

Where things stand is in :class:`fsdmoe.kernels.exchange_plan.Places`. The first and the third write over
the links between GPUs, by a given number of blocks that take pieces of them in turn, so that the rest of the
GPU stays with compute; the other two are local. Rows are moved as words of 4 bytes, whatever they hold.

Where a rank did not come to a barrier in time (``missing``), what the buffers hold is anything. What is read
from them then is not a number: the step cannot be taken for a good one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.exchange_plan import Places, Who
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv, next_power_of_2

_UNITS, _WARPS = 2048, 16
"""Of a block that writes: units of 16 bytes that it loads at a time, while as many are stored."""
_TILE_WORDS = 4096
"""Words of a block that reads."""
_MAX_COLUMNS = 2048


class Peers(NamedTuple):
    """One area in every rank's memory."""

    own: torch.Tensor
    """This rank's, bytes."""
    distances: torch.Tensor
    """int64 ``[S]``: from it to every rank's, in units of 16 bytes. An address that is told as a distance is
    known to be aligned, and 16 bytes are written at once."""


@triton.jit
def _locate(
    item, num_items, shift, items_S, last_S, start_ptr, tokens_ptr, num_tokens,
    WIDTH: tl.constexpr, STRETCHES: tl.constexpr, GATHERS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Which units an item is: their stretch, row and column in it, and the row that they are read from."""
    turn = item + shift
    turn = tl.where(turn >= num_items, turn - num_items, turn)
    stretch = tl.minimum(tl.sum((last_S <= turn).to(tl.int32), 0), STRETCHES - 1)
    before = tl.sum(tl.where(tl.arange(0, items_S.shape[0]) < stretch, items_S, 0), 0)
    start = tl.load(start_ptr + stretch)
    num_units = (tl.load(start_ptr + stretch + 1) - start) * WIDTH
    units = (turn - before) * UNITS + tl.arange(0, UNITS)
    inside = units < tl.where(item < num_items, num_units, 0)
    rows = units // WIDTH
    sources = start + rows
    if GATHERS:
        sources = tl.load(tokens_ptr + stretch * num_tokens + rows, mask=inside, other=0)
    return stretch, rows, units - rows * WIDTH, inside, sources


@triton.jit
def _read(x_ptr, sources, columns, inside, WIDTH: tl.constexpr, WORDS: tl.constexpr):
    at = (sources.to(tl.int64) * WIDTH + columns) * WORDS
    return tl.load(x_ptr + at[:, None] + tl.arange(0, WORDS)[None, :], mask=inside[:, None])


@triton.jit
def _write(
    own_ptr, peers_ptr, place_ptr, offset, stretch, rows, columns, inside, values,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    words_of_16_bytes: tl.constexpr = 128 // own_ptr.dtype.element_ty.primitive_bitwidth
    place = offset + tl.load(place_ptr + stretch) + rows
    at = (place.to(tl.int64) * WIDTH + columns) * WORDS
    for member in range(MEMBERS):
        peer_ptr = own_ptr + tl.load(peers_ptr + stretch * MEMBERS + member) * words_of_16_bytes
        tl.store(peer_ptr + at[:, None] + tl.arange(0, WORDS)[None, :], values, mask=inside[:, None])


@triton.jit
def _write_part(
    x_ptr, tokens_ptr, start_ptr, place_ptr, own_ptr, peers_ptr, offset, num_tokens, begin,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, STRETCHES: tl.constexpr, LANES: tl.constexpr,
    MEMBERS: tl.constexpr, GATHERS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Items of ``UNITS`` units of ``WORDS`` words, none of which spans two stretches. A load takes a
    microsecond, so three items are under way: the first is stored, the second loaded, the third looked up."""
    lanes = tl.arange(0, LANES)
    start_S = tl.load(start_ptr + lanes, mask=lanes < STRETCHES, other=0)
    end_S = tl.load(start_ptr + 1 + lanes, mask=lanes < STRETCHES, other=0)
    items_S = ((end_S - start_S) * WIDTH + UNITS - 1) // UNITS
    last_S = tl.cumsum(items_S, 0)
    num_items = tl.sum(items_S, 0)
    shift = tl.sum(tl.where(lanes < begin, items_S, 0), 0)
    item, step = tl.program_id(0), tl.num_programs(0)
    stretch, rows, columns, inside, sources = _locate(
        item, num_items, shift, items_S, last_S, start_ptr, tokens_ptr, num_tokens,
        WIDTH, STRETCHES, GATHERS, UNITS,
    )  # fmt: skip
    values = _read(x_ptr, sources, columns, inside, WIDTH, WORDS)
    next_stretch, next_rows, next_columns, next_inside, sources = _locate(
        item + step, num_items, shift, items_S, last_S, start_ptr, tokens_ptr, num_tokens,
        WIDTH, STRETCHES, GATHERS, UNITS,
    )  # fmt: skip
    for item in range(tl.program_id(0), num_items, step):
        next_values = _read(x_ptr, sources, next_columns, next_inside, WIDTH, WORDS)
        third_stretch, third_rows, third_columns, third_inside, sources = _locate(
            item + 2 * step, num_items, shift, items_S, last_S, start_ptr, tokens_ptr, num_tokens,
            WIDTH, STRETCHES, GATHERS, UNITS,
        )  # fmt: skip
        _write(
            own_ptr, peers_ptr, place_ptr, offset, stretch, rows, columns, inside, values,
            WIDTH, WORDS, MEMBERS,
        )  # fmt: skip
        stretch, rows, columns, inside = next_stretch, next_rows, next_columns, next_inside
        values = next_values
        next_stretch, next_rows, next_columns, next_inside = (
            third_stretch, third_rows, third_columns, third_inside
        )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["offset", "num_tokens", "begin"])
def _write_kernel(
    x_ptr, labels_ptr, tokens_ptr, start_ptr, place_ptr, own_ptr, own_labels_ptr, peers_ptr, label_peers_ptr,
    offset, num_tokens, begin,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, LABEL_WIDTH: tl.constexpr, LABEL_WORDS: tl.constexpr,
    STRETCHES: tl.constexpr, LANES: tl.constexpr, MEMBERS: tl.constexpr, GATHERS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    if WIDTH > 0:
        _write_part(
            x_ptr, tokens_ptr, start_ptr, place_ptr, own_ptr, peers_ptr, offset, num_tokens, begin,
            WIDTH, WORDS, STRETCHES, LANES, MEMBERS, GATHERS, UNITS,
        )  # fmt: skip
    if LABEL_WIDTH > 0:
        _write_part(
            labels_ptr, tokens_ptr, start_ptr, place_ptr, own_labels_ptr, label_peers_ptr, offset, num_tokens,
            begin, LABEL_WIDTH, LABEL_WORDS, STRETCHES, LANES, MEMBERS, GATHERS, UNITS,
        )  # fmt: skip


class _Stretches(NamedTuple):
    """Rows in order of the ranks that they go to."""

    start: torch.Tensor
    """Where each stretch begins, and the last one ends."""
    place: torch.Tensor
    """The row of the receiver that it begins at."""
    offset: int
    num_members: int
    """Ranks that get the same stretch."""
    begin: int
    """The stretch to begin with: another one on every rank, or all would write to the same one at a time."""
    tokens: torch.Tensor | None
    """The row to read, of each row of a stretch; None: they are in that order."""


def _write_stretches(
    rows: torch.Tensor | None, labels: torch.Tensor | None, peers: Peers, label_peers: Peers,
    stretches: _Stretches, blocks: int,
) -> None:  # fmt: skip
    words, width, unit = _in_units(rows)
    label_words, label_width, label_unit = _in_units(labels)
    some = words if words is not None else label_words
    if some is None or not len(some) or not width + label_width:
        return
    start, place, offset, num_members, begin, tokens = stretches
    num_items = cdiv(len(some) * len(place) * max(width, label_width), _UNITS)
    _write_kernel[(min(blocks, num_items),)](
        some if words is None else words, some if label_words is None else label_words,
        start if tokens is None else tokens, start, place,
        peers.own.view(some.dtype if words is None else words.dtype), label_peers.own.view(torch.int32),
        peers.distances, label_peers.distances, offset, len(some), begin % len(place),
        WIDTH=width, WORDS=unit, LABEL_WIDTH=label_width, LABEL_WORDS=label_unit, STRETCHES=len(place),
        LANES=max(2, next_power_of_2(len(place))), MEMBERS=num_members, GATHERS=tokens is not None,
        UNITS=_UNITS, num_warps=_WARPS,
    )  # fmt: skip


def deliver_rows(
    x_TW: torch.Tensor, labels_TL: torch.Tensor | None, tokens_PT: torch.Tensor, places: Places,
    peers: Peers, label_peers: Peers, who: Who, blocks: int,
) -> None:  # fmt: skip
    """To the places of the plan, in all ranks' memory."""
    stretches = _Stretches(places.start_P, places.base_P, 0, who.num_members, who.ep_rank + 1, tokens_PT)
    _write_stretches(x_TW, labels_TL, peers, label_peers, stretches, blocks)


def return_rows(
    y_RW: torch.Tensor | None, weights_RK: torch.Tensor | None, places: Places, peers: Peers,
    weight_peers: Peers, offset: int, who: Who, blocks: int,
) -> None:  # fmt: skip
    """Home, to ``offset`` (this ETP member's) of what the senders keep."""
    stretches = _Stretches(places.first_S, places.home_S, offset, 1, who.source + 1, None)
    _write_stretches(y_RW, weights_RK, peers, weight_peers, stretches, blocks)


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows"])
def _land_kernel(
    buffer_ptr, out_ptr, end_ptr, missing_ptr, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    landed = (rows < tl.load(end_ptr))[:, None] & (at < WIDTH)[None, :]
    offsets = rows.to(tl.int64)[:, None] * WIDTH + at[None, :]
    values = tl.load(buffer_ptr + offsets, mask=landed, other=0)
    # All bits set is NaN in every format of floating point that rows are sent in.
    values = tl.where(landed & (tl.load(missing_ptr) != 0), -1, values).to(values.dtype)
    tl.store(out_ptr + offsets, values, mask=(rows < num_rows)[:, None] & (at < WIDTH)[None, :])


@QuickLaunch
@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_experts"])
def _land_labels_kernel(
    buffer_ptr, out_ptr, end_ptr, missing_ptr, num_rows, first_expert, num_experts,
    LABELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    there = (rows < num_rows)[:, None] & (at < LABELS)[None, :]
    landed = (rows < tl.load(end_ptr))[:, None] & there
    offsets = rows.to(tl.int64)[:, None] * LABELS + at[None, :]
    values = tl.load(buffer_ptr + offsets, mask=landed, other=0)
    ids = values - first_expert
    ids = tl.where(tl.load(missing_ptr) != 0, 0, ids)  # some expert, or nobody would see these rows
    is_mine = landed & (ids >= 0) & (ids < num_experts)
    is_id = (at >= LABELS // 2)[None, :]
    tl.store(out_ptr + offsets, tl.where(is_id, tl.where(is_mine, ids, -1), values), mask=there)


def land_rows(buffer: torch.Tensor, out_RW: torch.Tensor, places: Places, missing: torch.Tensor) -> None:
    """The buffer's rows (bytes) into ``out_RW``, zeros where none landed."""
    words = as_words(out_RW)
    width = words.shape[1]
    if words.numel():
        columns = min(next_power_of_2(width), _MAX_COLUMNS)
        rows = max(1, _TILE_WORDS // columns)
        _land_kernel[(cdiv(len(words), rows), cdiv(width, columns))](
            buffer.view(words.dtype), words, places.first_S[-1:], missing, len(words),
            WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=8,
        )  # fmt: skip


def land_labels(
    buffer: torch.Tensor, out_RL: torch.Tensor, places: Places, missing: torch.Tensor, first_expert: int,
    num_experts: int,
) -> None:  # fmt: skip
    """The buffer's weights and ids into ``out_RL``: ids as this rank counts its experts, -1 for others and in
    free rows."""
    num_rows, width = out_RL.shape
    if out_RL.numel():
        columns = next_power_of_2(width)
        rows = max(1, 1024 // columns)
        _land_labels_kernel[(cdiv(num_rows, rows),)](
            buffer.view(torch.int32), out_RL, places.first_S[-1:], missing, num_rows, first_expert,
            num_experts,
            LABELS=width, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["num_kept"])
def _sum_kernel(
    buffer_ptr, out_ptr, index_ptr, start_ptr, flag_ptr, missing_ptr, num_kept,
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
    is_lost = (tl.load(flag_ptr) != 0) | (tl.load(missing_ptr) != 0)
    total = tl.where(is_lost, float("nan"), total)
    tl.store(out_ptr + token * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


def sum_returned(
    buffer: torch.Tensor,
    out_TW: torch.Tensor,
    index_TP: torch.Tensor,
    places: Places,
    missing: torch.Tensor,
    num_kept: int,
    who: Who,
) -> None:
    """Each token's results into ``out_TW``; NaN where the flag is raised or a rank is missing. ``num_kept``:
    rows that a rank keeps for each ETP member."""
    num_tokens, width = out_TW.shape
    if out_TW.numel():
        columns = min(next_power_of_2(width), _MAX_COLUMNS)
        _sum_kernel[(num_tokens, cdiv(width, columns))](
            buffer.view(out_TW.dtype), out_TW, index_TP, places.start_P, places.flag, missing, num_kept,
            WIDTH=width, NUM_RANKS=who.num_ranks, MEMBERS=who.num_members, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


def as_words(x_RW: torch.Tensor) -> torch.Tensor:
    """The same bytes, contiguous, in 4-byte words where rows are a multiple of them."""
    x_RW = x_RW.contiguous()
    if x_RW.shape[1] * x_RW.element_size() % 4 == 0:
        return x_RW.view(torch.int32)
    return x_RW.view(torch.uint8)


def _in_units(rows: torch.Tensor | None) -> tuple[torch.Tensor | None, int, int]:
    """Words of these rows, how many units a row is, and how many words a unit of up to 16 bytes is."""
    if rows is None:
        return None, 0, 1
    words = as_words(rows)
    unit = math.gcd(words.shape[1], 16 // words.element_size()) or 1
    return words, words.shape[1] // unit, unit
