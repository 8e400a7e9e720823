"""Pieces of documents, end to end: what the planner passes to the reader of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NO_SOURCE = -1
"""The source of padding."""


class Columns:
    """A dataclass of equally long arrays, seen as rows."""

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The rows, as plain integers."""
        return zip(*(column.tolist() for column in vars(self).values()), strict=True)

    def __getitem__(self, rows: Any) -> Self:
        """Some of the rows: a slice, or their numbers."""
        return type(self)(*(column[rows] for column in vars(self).values()))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class Spans(Columns):
    """Consecutive pieces of documents, in stream order: tokens [start, stop) of a document of a source.
    Padding, where rows are not filled, is a piece of no source."""

    source_N: IntArray
    document_N: IntArray
    start_N: IntArray
    stop_N: IntArray

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
