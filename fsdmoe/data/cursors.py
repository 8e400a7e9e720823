"""Chunks to rows: several documents are read side by side, so that a batch is not one long document.

    order     a(5 rows long)  b  c  d ...           cursors = 3, row r comes from cursor r mod 3
    cursor 0  | a | a | a | a | a |
    cursor 1  | b | b d | d | ...                   a cursor at the end of its chunk takes the next of the
    cursor 2  | c e | f | ...                       order, in the middle of a row if need be
    rows      a b c  a b+d c+e  a d f ...

Rows are full, and each keeps as much of its document as fits; without `pack`, what one document leaves of a
row is padding. Records with a loss mask stay whole, since an answer is learnt with its question: one that
does not fit waits at its cursor for the cursor's next row. The rest of the row takes the longest records
that fit of those which wait at other cursors, then padding. Only a record longer than a row is cut.

The position is the counters of the order and where each cursor stands: a few numbers a cursor, which say
nothing of rows, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdmoe.data.order import ChunkOrder, Progress
from fsdmoe.data.spans import NO_SOURCE, Spans

_CHUNKS_AT_ONCE = 256


class Cursor(NamedTuple):
    """The chunk that is being read, and how far: up to token `offset` of the document."""

    source: int
    place: int
    document: int
    offset: int
    stop: int


@dataclass(frozen=True)
class Position:
    """A place in the global stream: the order's counters, the open cursors, and which of them is next."""

    progress: tuple[Progress, ...]
    cursors: tuple[Cursor | None, ...]
    next_cursor: int = 0


def start_position(num_sources: int, num_cursors: int) -> Position:
    """The position before the first token."""
    return Position((Progress(),) * num_sources, (None,) * num_cursors)


def open_cursor(order: ChunkOrder, source: int, place: int, offset: int) -> Cursor | None:
    """A cursor from what is saved of it; None where its document is held out by now."""
    chunk = order.at(source, place)
    stop = int(chunk.start_N[0] + chunk.length_N[0])
    return Cursor(source, place, int(chunk.document_N[0]), offset, stop) if offset < stop else None


class RowPlanner:
    """Plans rows from a position on, without touching a token."""

    def __init__(self, order: ChunkOrder, position: Position, seq_len: int, *, pack: bool = True) -> None:
        self._feed = _ChunkFeed(order, position.progress)
        self._cursors = list(position.cursors)
        self._keeps_whole = [table.store.keeps_whole for table in order.tables]
        self._next_cursor = position.next_cursor
        self._seq_len = seq_len
        self._pack = pack

    @property
    def position(self) -> Position:
        """The position behind the rows planned so far."""
        return Position(self._feed.progress, tuple(self._cursors), self._next_cursor)

    def next_rows(self, num_rows: int) -> Spans:
        """The spans of the next rows; each row's add up to `seq_len` tokens."""
        pieces: list[tuple[int, int, int, int]] = []
        for _ in range(num_rows):
            self._fill_row(pieces)
            self._next_cursor = (self._next_cursor + 1) % len(self._cursors)
        return Spans(*np.array(pieces, dtype=np.int64).T)

    def _fill_row(self, pieces: list[tuple[int, int, int, int]]) -> None:
        free = self._seq_len
        cursor = self._cursors[self._next_cursor]
        while free > 0:
            if cursor is None:
                cursor = self._feed.take()
            if free < self._seq_len and self._would_cut(cursor, free):
                break
            stop = min(cursor.offset + free, cursor.stop)
            pieces.append((cursor.source, cursor.document, cursor.offset, stop))
            free -= stop - cursor.offset
            cursor = cursor._replace(offset=stop) if stop < cursor.stop else None
            if not self._pack:
                break
        self._cursors[self._next_cursor] = cursor
        while self._pack and free > 0 and (waiting := self._take_waiting(free)) is not None:
            pieces.append((waiting.source, waiting.document, waiting.offset, waiting.stop))
            free -= waiting.stop - waiting.offset
        if free > 0:
            pieces.append((NO_SOURCE, 0, 0, free))

    def _would_cut(self, cursor: Cursor, free: int) -> bool:
        return self._keeps_whole[cursor.source] and cursor.stop - cursor.offset > free

    def _take_waiting(self, free: int) -> Cursor | None:
        """The longest record at a cursor that fits; its cursor then takes the next of the order."""
        longest, found = 0, None
        for number, cursor in enumerate(self._cursors):
            if cursor is None or not self._keeps_whole[cursor.source]:
                continue
            if longest < cursor.stop - cursor.offset <= free:
                longest, found = cursor.stop - cursor.offset, number
        if found is None:
            return None
        taken, self._cursors[found] = self._cursors[found], None
        return taken


class _ChunkFeed:
    """Takes chunks off the order one by one; they are ordered a few hundred at a time."""

    def __init__(self, order: ChunkOrder, progress: Sequence[Progress]) -> None:
        self._order = order
        self._chunks = [p.chunks for p in progress]
        self._tokens = [p.tokens for p in progress]
        self._earlier = [p.earlier for p in progress]
        shares = [weight / sum(order.weights) for weight in order.weights]
        chunks_per_token = sum(s / t.mean_tokens for s, t in zip(shares, order.tables, strict=True))
        self._tokens_at_once = max(int(_CHUNKS_AT_ONCE / chunks_per_token), 1)
        self._waiting: list[tuple[int, ...]] = []

    @property
    def progress(self) -> tuple[Progress, ...]:
        columns = (self._chunks, self._tokens, self._earlier)
        return tuple(Progress(*counters) for counters in zip(*columns, strict=True))

    def take(self) -> Cursor:
        if not self._waiting:
            self._waiting = list(self._order.draw(self.progress, self._tokens_at_once)[::-1])
        source, place, document, start, length = self._waiting.pop()
        self._chunks[source] = place + 1
        self._tokens[source] += length
        return Cursor(source, place, document, start, start + length)
