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

_UNITS = 4096
"""Of up to 16 bytes, that a block loads before it writes them. Its warps do not wait for each other, and that
is what hides how long a load takes: blocks are large, and many loads are under way in each."""
_TILE_WORDS = 4096
"""Words of a block that reads."""
_MAX_COLUMNS = 2048
_MAX_UNITS = 2**31 - 2**26
"""Of all rows: what 32 bits count, less than a step of all blocks."""


class Peers(NamedTuple):
    """One area in every rank's memory."""

    own: torch.Tensor
    """This rank's, bytes."""
    distances: torch.Tensor
    """int64 ``[S]``: from it to every rank's, in units of 16 bytes. An address that is told as a distance is
    known to be aligned, and 16 bytes are written at once."""


@triton.jit
def load_units(x_ptr, units, inside, WORDS: tl.constexpr):
    at = units.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None])


@triton.jit
def _deliver_units(
    values, units, inside, routes_ptr, base_ptr, own_ptr, peers_ptr,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, COPIES: tl.constexpr, IS_WHOLE: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    words_of_16_bytes: tl.constexpr = 128 // own_ptr.dtype.element_ty.primitive_bitwidth
    rows = units // WIDTH
    columns = units - rows * WIDTH
    route_ptr = routes_ptr + rows * (2 * COPIES)
    words = tl.arange(0, WORDS)
    for copy in range(COPIES):
        index = tl.load(route_ptr + 2 * copy + 1, mask=inside, other=-1)
        needed = index >= 0
        rank = copy  # the same for all units, as is all that follows from it
        if not IS_WHOLE:
            rank = tl.load(route_ptr + 2 * copy, mask=needed, other=0)
        place = (tl.load(base_ptr + rank) + index) * WIDTH + columns
        at = place.to(tl.int64) * WORDS
        for member in range(MEMBERS):
            distance = tl.load(peers_ptr + rank * MEMBERS + member) * words_of_16_bytes
            tl.store(own_ptr + (distance + at)[:, None] + words[None, :], values, mask=needed[:, None])


@triton.jit
def _deliver_part(
    x_ptr, routes_ptr, base_ptr, own_ptr, peers_ptr, num_tokens,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, COPIES: tl.constexpr, IS_WHOLE: tl.constexpr,
    MEMBERS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Every unit is read once, and written wherever it is needed."""
    end = num_tokens * WIDTH
    step = tl.num_programs(0) * UNITS
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    for _ in range(tl.program_id(0) * UNITS, end, step):
        inside = units < end
        values = load_units(x_ptr, units, inside, WORDS)
        _deliver_units(
            values, units, inside, routes_ptr, base_ptr, own_ptr, peers_ptr,
            WIDTH, WORDS, COPIES, IS_WHOLE, MEMBERS,
        )  # fmt: skip
        units += step


@QuickLaunch
@triton.jit(do_not_specialize=["num_tokens"])
def _deliver_kernel(
    x_ptr, labels_ptr, routes_ptr, base_ptr, flag_ptr, own_ptr, own_labels_ptr, peers_ptr, label_peers_ptr,
    num_tokens,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, LABEL_WIDTH: tl.constexpr, LABEL_WORDS: tl.constexpr,
    COPIES: tl.constexpr, IS_WHOLE: tl.constexpr, MEMBERS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    num_tokens = tl.where(tl.load(flag_ptr) != 0, 0, num_tokens)
    _deliver_part(
        x_ptr, routes_ptr, base_ptr, own_ptr, peers_ptr, num_tokens,
        WIDTH, WORDS, COPIES, IS_WHOLE, MEMBERS, UNITS,
    )  # fmt: skip
    if LABEL_WIDTH > 0:
        _deliver_part(
            labels_ptr, routes_ptr, base_ptr, own_labels_ptr, label_peers_ptr, num_tokens,
            LABEL_WIDTH, LABEL_WORDS, COPIES, IS_WHOLE, MEMBERS, UNITS,
        )  # fmt: skip


def deliver_rows(
    x_TW: torch.Tensor, labels_TL: torch.Tensor | None, routes_TC2: torch.Tensor, places: Places,
    peers: Peers, label_peers: Peers, who: Who, blocks: int,
) -> None:  # fmt: skip
    """To the places of the plan, in all ranks' memory."""
    words, width, unit = in_units(x_TW, peers.own)
    labels, label_width, label_unit = words, 0, 1
    if labels_TL is not None:
        labels, label_width, label_unit = in_units(labels_TL, label_peers.own)
    if not words.numel() or not routes_TC2.numel():
        return
    _deliver_kernel[(min(blocks, cdiv(len(words) * width, _UNITS)),)](
        words, labels, routes_TC2, places.base_P, places.flag, peers.own.view(words.dtype),
        label_peers.own.view(labels.dtype), peers.distances, label_peers.distances, len(words),
        WIDTH=width, WORDS=unit, LABEL_WIDTH=label_width, LABEL_WORDS=label_unit,
        COPIES=routes_TC2.shape[1], IS_WHOLE=routes_TC2.shape[1] == who.num_ranks, MEMBERS=who.num_members,
        UNITS=_UNITS, num_warps=32,
    )  # fmt: skip


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
    values = tl.where(landed & (tl.load(missing_ptr) != 0), ~tl.zeros_like(values), values)
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


@triton.jit
def _return_part(
    y_ptr, first_ptr, home_ptr, own_ptr, peers_ptr, offset, begin,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, NUM_SOURCES: tl.constexpr, LANES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """In items that are of one source each. Every rank begins with another one, or all would write to the
    same rank at a time."""
    words_of_16_bytes: tl.constexpr = 128 // own_ptr.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, LANES)
    first_S = tl.load(first_ptr + lanes, mask=lanes < NUM_SOURCES, other=0)
    end_S = tl.load(first_ptr + 1 + lanes, mask=lanes < NUM_SOURCES, other=0)
    items_S = ((end_S - first_S) * WIDTH + UNITS - 1) // UNITS
    last_S = tl.cumsum(items_S, 0)
    num_items = tl.sum(items_S, 0)
    shift = tl.sum(tl.where(lanes < begin, items_S, 0), 0)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = number + shift
        item = tl.where(item >= num_items, item - num_items, item)
        source = tl.sum((last_S <= item).to(tl.int32), 0)
        item -= tl.sum(tl.where(lanes < source, items_S, 0), 0)
        units = item * UNITS + tl.arange(0, UNITS)
        first = tl.load(first_ptr + source)
        inside = units < (tl.load(first_ptr + source + 1) - first) * WIDTH
        values = load_units(y_ptr + first.to(tl.int64) * WIDTH * WORDS, units, inside, WORDS)
        place = offset + tl.load(home_ptr + source).to(tl.int64)
        peer_ptr = own_ptr + tl.load(peers_ptr + source) * words_of_16_bytes
        at = (place * WIDTH + units) * WORDS
        tl.store(peer_ptr + at[:, None] + tl.arange(0, WORDS)[None, :], values, mask=inside[:, None])


@QuickLaunch
@triton.jit(do_not_specialize=["offset", "begin"])
def _return_kernel(
    y_ptr, weights_ptr, first_ptr, home_ptr, own_ptr, own_weights_ptr, peers_ptr, weight_peers_ptr, offset,
    begin,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, WEIGHT_WIDTH: tl.constexpr, WEIGHT_WORDS: tl.constexpr,
    NUM_SOURCES: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    if WIDTH > 0:
        _return_part(
            y_ptr, first_ptr, home_ptr, own_ptr, peers_ptr, offset, begin,
            WIDTH, WORDS, NUM_SOURCES, LANES, UNITS,
        )  # fmt: skip
    if WEIGHT_WIDTH > 0:
        _return_part(
            weights_ptr, first_ptr, home_ptr, own_weights_ptr, weight_peers_ptr, offset, begin,
            WEIGHT_WIDTH, WEIGHT_WORDS, NUM_SOURCES, LANES, UNITS,
        )  # fmt: skip


def return_rows(
    y_RW: torch.Tensor | None, weights_RK: torch.Tensor | None, places: Places, peers: Peers,
    weight_peers: Peers, offset: int, who: Who, blocks: int,
) -> None:  # fmt: skip
    """Home, to ``offset`` (this ETP member's) of what the senders keep."""
    some = y_RW if y_RW is not None else weights_RK
    if some is None or not some.numel():
        return
    words, width, unit = in_units(some, (weight_peers if y_RW is None else peers).own)
    weights, weight_width, weight_unit = in_units(
        some if weights_RK is None else weights_RK, weight_peers.own
    )
    width, weight_width = 0 if y_RW is None else width, 0 if weights_RK is None else weight_width
    _return_kernel[(min(blocks, cdiv(len(words) * max(width, weight_width), _UNITS)),)](
        words, weights, places.first_S, places.home_S, peers.own.view(words.dtype),
        weight_peers.own.view(weights.dtype), peers.distances, weight_peers.distances, offset,
        (who.source + 1) % who.num_sources, WIDTH=width, WORDS=unit, WEIGHT_WIDTH=weight_width,
        WEIGHT_WORDS=weight_unit, NUM_SOURCES=who.num_sources,
        LANES=max(2, next_power_of_2(who.num_sources)), UNITS=_UNITS, num_warps=16,
    )  # fmt: skip


@QuickLaunch
@triton.jit(do_not_specialize=["num_kept"])
def _sum_kernel(
    buffer_ptr, out_ptr, routes_ptr, start_ptr, flag_ptr, missing_ptr, num_kept,
    WIDTH: tl.constexpr, COPIES: tl.constexpr, MEMBERS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for copy in range(COPIES):
        rank = tl.load(routes_ptr + (token * COPIES + copy) * 2)
        index = tl.load(routes_ptr + (token * COPIES + copy) * 2 + 1)
        limit = tl.where(rank >= 0, WIDTH, 0)
        start = tl.load(start_ptr + tl.maximum(rank, 0))
        for member in range(MEMBERS):
            place = (member * num_kept + start + index).to(tl.int64)
            here = tl.load(buffer_ptr + place * WIDTH + at, mask=at < limit, other=0.0)
            total += here.to(tl.float32)
    # Nothing came back where something did not fit: make that NaN instead of training on it.
    is_lost = (tl.load(flag_ptr) != 0) | (tl.load(missing_ptr) != 0)
    total = tl.where(is_lost, float("nan"), total)
    tl.store(out_ptr + token * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


def sum_returned(
    buffer: torch.Tensor,
    out_TW: torch.Tensor,
    routes_TC2: torch.Tensor,
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
            buffer.view(out_TW.dtype), out_TW, routes_TC2, places.start_P, places.flag, missing, num_kept,
            WIDTH=width, COPIES=routes_TC2.shape[1], MEMBERS=who.num_members, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


def as_words(x_RW: torch.Tensor) -> torch.Tensor:
    """The same bytes, contiguous, in 4-byte words where rows are a multiple of them."""
    x_RW = x_RW.contiguous()
    if x_RW.shape[1] * x_RW.element_size() % 4 == 0:
        return x_RW.view(torch.int32)
    return x_RW.view(torch.uint8)


def in_units(rows: torch.Tensor, area: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Words of these rows, how many units a row is, and how many words a unit of up to 16 bytes is."""
    words = as_words(rows)
    unit = math.gcd(words.shape[1], 16 // words.element_size())
    if max(words.nbytes, area.nbytes) >= _MAX_UNITS * unit * words.element_size():
        raise AssertionError(f"expected less than {_MAX_UNITS} units of rows, which 32 bits count")
    return words, words.shape[1] // unit, unit
