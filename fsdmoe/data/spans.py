"""Pieces of documents, end to end: what the planner passes to the reader of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NO_SOURCE = -1
"""The source of padding."""


@dataclass(frozen=True)
class Spans:
    """Consecutive pieces of documents, in stream order: tokens [start, stop) of a document of a source.
    Padding, where rows are not filled, is a piece of no source."""

    source_N: IntArray
    document_N: IntArray
    start_N: IntArray
    stop_N: IntArray

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """(source, document, start, stop) of each piece, as plain integers."""
        columns = (self.source_N, self.document_N, self.start_N, self.stop_N)
        return zip(*(column.tolist() for column in columns), strict=True)

    def __getitem__(self, part: slice) -> Spans:
        return Spans(self.source_N[part], self.document_N[part], self.start_N[part], self.stop_N[part])

    @staticmethod
    def join(parts: Sequence[Spans]) -> Spans:
        """Several lists of pieces as one."""
        empty = np.zeros(0, dtype=np.int64)
        columns = [(part.source_N, part.document_N, part.start_N, part.stop_N) for part in parts]
        columns.append((empty, empty, empty, empty))
        return Spans(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    @property
    def num_tokens(self) -> int:
        return int((self.stop_N - self.start_N).sum())

    def crop(self, first: int, last: int) -> Spans:
        """The part that covers tokens [first, last) of these spans laid end to end."""
        ends = np.cumsum(self.stop_N - self.start_N)
        low = int(np.searchsorted(ends, first, side="right"))
        high = min(int(np.searchsorted(ends, last, side="left")) + 1, len(ends)) if last > first else low
        start_N, stop_N = self.start_N[low:high].copy(), self.stop_N[low:high].copy()
        if high > low:
            stop_N[-1] -= max(int(ends[high - 1]) - last, 0)
            start_N[0] = self.stop_N[low] - (int(ends[low]) - first)
        return Spans(self.source_N[low:high], self.document_N[low:high], start_N, stop_N)
