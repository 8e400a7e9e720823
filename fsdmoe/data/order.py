"""Which chunk (a document, or a piece of a long one) comes next: a pure function of the seed and of two
counters a source.

Every source is an endless list of chunks: its epochs one after the other, each in its own seeded permutation.
A mixture merges these lists by **virtual time**: a chunk starts at (tokens its source has given before it) /
(weight of its source), and chunks come in the order of their starts, ties to the source named first.

    weights 2 : 1       tokens given before, over weight
    source A  |--a0--|--a1--|-a2-|--a3--|        0    3    6    8  ...
    source B  |---b0---|---b1---|---b2--|        0    8    16 ...
    stream    a0 b0 a1 a2 a3 b1 ...              shares are right to within one chunk a source

So a chunk's place depends on nothing but its own source and the weights: no random draw, no hidden state, and
thousands of chunks are ordered with a few vector operations. Nothing here depends on ranks, rows or batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdmoe.data.chunks import ChunkTable
from fsdmoe.data.permutation import SeededPermutation
from fsdmoe.data.spans import Columns, IntArray


@dataclass(frozen=True)
class Progress:
    """How far one source has been drawn."""

    chunks: int = 0
    """Place in the source's endless list, epochs included: chunks drawn or passed over."""
    tokens: int = 0
    """Tokens of the chunks drawn: the source's clock in the mixture."""
    earlier: int = 0
    """Tokens drawn before the clocks began anew, under another mixture."""


@dataclass(frozen=True)
class Draw(Columns):
    """Consecutive chunks of the mixture, or of one source of it."""

    source_N: IntArray
    place_N: IntArray
    """Where each stands in its source's endless list."""
    document_N: IntArray
    start_N: IntArray
    length_N: IntArray


class ChunkOrder:
    """The endless order of a weighted mixture."""

    def __init__(
        self, tables: Sequence[ChunkTable], weights: Sequence[float], *, seed: int, shuffle: bool
    ) -> None:
        self.tables = tuple(tables)
        self.weights = tuple(weights)
        self.seed = seed
        self.shuffle = shuffle

    def draw(self, progress: Sequence[Progress], num_tokens: int) -> Draw:
        """The next chunks after the given counters, at least `num_tokens` tokens in all."""
        horizon = _horizon([p.tokens for p in progress], self.weights, num_tokens)
        while True:
            draws = [self._draw_before(i, p, horizon) for i, p in enumerate(progress)]
            if sum(int(draw.length_N.sum()) for draw, _ in draws) >= num_tokens:
                break
            # The horizon is exact but for rounding; the next float may be needed.
            horizon = math.nextafter(horizon, math.inf) + horizon * 1e-12
        # Stable, over arrays joined in source order: equal starts go to the source named first.
        merged = np.argsort(np.concatenate([virtual_N for _, virtual_N in draws]), kind="stable")
        return Draw.join([draw for draw, _ in draws])[merged]

    def at(self, source: int, place: int) -> Draw:
        """The chunk at one place of a source's endless list."""
        return self._draw_places(source, place, place + 1)

    def _draw_before(
        self, source: int, progress: Progress, horizon: float
    ) -> tuple[Draw, npt.NDArray[np.float64]]:
        """A source's chunks that start before a virtual time, with their starts."""
        weight, mean_tokens = self.weights[source], self.tables[source].mean_tokens
        place, tokens = progress.chunks, progress.tokens
        parts = [self._draw_places(source, place, place)]
        while tokens / weight < horizon:
            missing = horizon * weight - tokens
            count = min(math.ceil(1.1 * missing / mean_tokens) + 8, 1 << 20)
            draw = self._draw_places(source, place, place + count)
            parts.append(draw[np.flatnonzero(draw.length_N)])
            place += count
            tokens += int(draw.length_N.sum())
        draw = Draw.join(parts)
        virtual_N = (progress.tokens + np.cumsum(draw.length_N) - draw.length_N) / weight
        num_before = int(np.searchsorted(virtual_N, horizon, side="left"))
        return draw[:num_before], virtual_N[:num_before]

    def _draw_places(self, source: int, first: int, last: int) -> Draw:
        """Places [first, last) of a source's endless list, held-out chunks (of no length) included."""
        table = self.tables[source]
        chunks_N = self._chunks_at(table, first, last)
        document_N, start_N = table.locate(chunks_N)
        source_N = np.full_like(chunks_N, source)
        return Draw(
            source_N, np.arange(first, last, dtype=np.int64), document_N, start_N, table.lengths(chunks_N)
        )

    def _chunks_at(self, table: ChunkTable, first: int, last: int) -> IntArray:
        size = table.num_chunks
        if not self.shuffle or size == 1:
            return np.arange(first, last, dtype=np.int64) % size
        parts = [np.zeros(0, dtype=np.int64)]
        for epoch in range(first // size, (last - 1) // size + 1 if last > first else 0):
            within = np.arange(max(first - epoch * size, 0), min(last - epoch * size, size), dtype=np.int64)
            # Keyed by content: a source is shuffled in the same way wherever it stands in a mixture.
            parts.append(SeededPermutation(size, f"{self.seed}/{table.store.fingerprint}/{epoch}")(within))
        return np.concatenate(parts)


def _horizon(tokens: list[int], weights: Sequence[float], wanted: int) -> float:
    """The virtual time by which the sources together give `wanted` more tokens.

    Sources that are ahead give nothing until the others have caught up; so the time is found by filling the
    sources up in the order of their clocks.
    """
    sum_tokens, sum_weights, horizon = 0, 0.0, math.inf
    for clock, given, weight in sorted((t / w, t, w) for t, w in zip(tokens, weights, strict=True)):
        if clock >= horizon:
            break
        sum_tokens, sum_weights = sum_tokens + given, sum_weights + weight
        horizon = (sum_tokens + wanted) / sum_weights
    return horizon
