"""Units to rows: several documents are read side by side, so that a batch is not one long document.

    order   a(5 rows long)  b  c  d ...             lanes = 3, row r comes from lane r mod 3
    lane 0  | a | a | a | a | a |
    lane 1  | b | b d | d | ...                     a lane that ends its unit draws the next one of the order,
    lane 2  | c e | f | ...                         in the middle of a row if need be
    rows    a b c  a b+d c+e  a d f ...

Rows are full, and each keeps the longest stretch of its document that fits. The position is the counters of
the order and what is open in each lane: a few numbers a lane, which say nothing of rows, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdmoe.data.order import Progress, UnitOrder
from fsdmoe.data.spans import Spans

_UNITS_AT_ONCE = 256


class Lane(NamedTuple):
    """The unit that a lane is reading, and how far: up to token `offset` of the document."""

    source: int
    place: int
    document: int
    offset: int
    stop: int


@dataclass(frozen=True)
class Position:
    """A place in the global stream: the order's counters, the open lanes, and whose turn it is."""

    progress: tuple[Progress, ...]
    lanes: tuple[Lane | None, ...]
    next_lane: int = 0


def start_position(num_sources: int, num_lanes: int) -> Position:
    """The position before the first token."""
    return Position((Progress(),) * num_sources, (None,) * num_lanes)


def open_lane(order: UnitOrder, source: int, place: int, offset: int) -> Lane | None:
    """A lane from what is saved of it; None where its document is held out by now."""
    unit = order.at(source, place)
    lane = Lane(source, place, int(unit.document_N[0]), offset, int(unit.start_N[0] + unit.length_N[0]))
    return lane if offset < lane.stop else None


class RowPlanner:
    """Plans rows from a position on, without touching a token."""

    def __init__(self, order: UnitOrder, position: Position, seq_len: int) -> None:
        self._feed = _UnitFeed(order, position.progress)
        self._lanes = list(position.lanes)
        self._next_lane = position.next_lane
        self._seq_len = seq_len

    @property
    def position(self) -> Position:
        """The position behind the rows planned so far."""
        return Position(self._feed.progress, tuple(self._lanes), self._next_lane)

    def next_rows(self, num_rows: int) -> Spans:
        """The spans of the next rows; each row's add up to `seq_len` tokens."""
        pieces: list[tuple[int, int, int, int]] = []
        for _ in range(num_rows):
            self._fill_row(pieces)
            self._next_lane = (self._next_lane + 1) % len(self._lanes)
        return Spans(*np.array(pieces, dtype=np.int64).T)

    def _fill_row(self, pieces: list[tuple[int, int, int, int]]) -> None:
        free = self._seq_len
        lane = self._lanes[self._next_lane]
        while free > 0:
            if lane is None:
                lane = self._feed.take()
            stop = min(lane.offset + free, lane.stop)
            pieces.append((lane.source, lane.document, lane.offset, stop))
            free -= stop - lane.offset
            lane = Lane(lane.source, lane.place, lane.document, stop, lane.stop) if stop < lane.stop else None
        self._lanes[self._next_lane] = lane


class _UnitFeed:
    """Takes units off the order one by one; they are ordered a few hundred at a time."""

    def __init__(self, order: UnitOrder, progress: Sequence[Progress]) -> None:
        self._order = order
        self._units = [p.units for p in progress]
        self._tokens = [p.tokens for p in progress]
        shares = [weight / sum(order.weights) for weight in order.weights]
        units_per_token = sum(s / t.mean_tokens for s, t in zip(shares, order.tables, strict=True))
        self._tokens_at_once = max(int(_UNITS_AT_ONCE / units_per_token), 1)
        self._waiting: list[tuple[int, ...]] = []

    @property
    def progress(self) -> tuple[Progress, ...]:
        return tuple(Progress(units, tokens) for units, tokens in zip(self._units, self._tokens, strict=True))

    def take(self) -> Lane:
        if not self._waiting:
            draw = self._order.draw(self.progress, self._tokens_at_once)
            columns = (draw.source_N, draw.place_N, draw.document_N, draw.start_N, draw.length_N)
            self._waiting = list(zip(*(column[::-1].tolist() for column in columns), strict=True))
        source, place, document, start, length = self._waiting.pop()
        self._units[source] = place + 1
        self._tokens[source] += length
        return Lane(source, place, document, start, start + length)
