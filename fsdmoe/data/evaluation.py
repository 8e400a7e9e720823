"""The rows that evaluation reads: every held-out token once, mixed so that any beginning is a fair sample.

    document  |  row  |  row  |  row  | tail     whole rows stand alone, with their full context;
    document  |  row  | tail                     the tails are laid end to end and cut into rows

Without packing, every tail is a row of its own, filled up with padding. Tails of chats and other records that
stay whole are not cut either: one that does not fit begins the next row.

Whole rows are put in a fixed, mixed order; the one row that the tails may leave unfilled comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fsdmoe.data.permutation import SeededPermutation
from fsdmoe.data.spans import NO_SOURCE, Spans


class EvalRows:
    """Held-out documents as rows of `seq_len` tokens. `keeps_whole`: of each source; empty for none."""

    def __init__(
        self, documents: Spans, seq_len: int, *, pack: bool = True, keeps_whole: Sequence[bool] = ()
    ) -> None:
        lengths = documents.stop_N - documents.start_N
        num_whole = lengths // seq_len
        which = np.repeat(np.arange(len(lengths)), num_whole)
        within = np.arange(len(which)) - np.repeat(np.cumsum(num_whole) - num_whole, num_whole)
        start_N = within * seq_len
        self._whole = Spans(
            documents.source_N[which], documents.document_N[which], start_N, start_N + seq_len
        )
        ragged = np.flatnonzero(lengths % seq_len)
        self._tails = replace(documents, start_N=num_whole * seq_len)[ragged]
        if not pack:
            self._tails = _padded(self._tails, seq_len)
        elif any(keeps_whole):
            self._tails = _uncut(self._tails, seq_len, keeps_whole)
        self._seq_len = seq_len
        self._num_filled = len(which) + self._tails.num_tokens // seq_len
        self.num_rows = len(which) + -(-self._tails.num_tokens // seq_len)

    def read(self, first: int, last: int) -> Spans:
        """Rows [first, last); only the last row of all may be unfilled, and rows behind it are left out."""
        filled = np.arange(first, min(last, self._num_filled), dtype=np.int64)
        rows = SeededPermutation(self._num_filled, "evaluation")(filled).tolist() if filled.size else []
        if first <= self._num_filled < min(last, self.num_rows):
            rows.append(self._num_filled)
        return Spans.join([self._tails[:0], *(self._row(row) for row in rows)])

    def _row(self, row: int) -> Spans:
        num_whole = len(self._whole.source_N)
        if row < num_whole:
            return self._whole[row : row + 1]
        first = (row - num_whole) * self._seq_len
        return self._tails.crop(first, min(first + self._seq_len, self._tails.num_tokens))


def _padded(pieces: Spans, seq_len: int) -> Spans:
    """Each piece followed by the padding that fills its row."""
    zeros = np.zeros_like(pieces.start_N)
    left = seq_len - (pieces.stop_N - pieces.start_N)
    padding = Spans(np.full_like(zeros, NO_SOURCE), zeros, zeros, left)
    in_turns = np.arange(2 * len(zeros)).reshape(2, -1).T.reshape(-1)
    return Spans.join([pieces, padding])[in_turns]


def _uncut(pieces: Spans, seq_len: int, keeps_whole: Sequence[bool]) -> Spans:
    """With padding before each piece that stays whole and that the end of a row would cut."""
    laid: list[tuple[int, ...]] = []
    free = seq_len
    for source, document, start, stop in pieces:
        if keeps_whole[source] and stop - start > free:
            laid.append((NO_SOURCE, 0, 0, free))
            free = seq_len
        laid.append((source, document, start, stop))
        free = (free - (stop - start)) % seq_len or seq_len
    return Spans(*np.array(laid, dtype=np.int64).reshape(-1, 4).T)
