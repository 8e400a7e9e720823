"""Which queries attend to which keys, as work for variable-length attention kernels.

A query sees a key of the same document at the same or an earlier position. Between the queries of one rank
and the keys of some ranks this is not one triangle, but after sorting both sides by (document, position) it
falls into *segments*: a range of queries of one document and the range of that document's keys from its
first one on. Two kinds of :class:`Block` gather segments for one kernel call::

    causal = True     each next query sees one key more    keys contain the queries: own keys, or all keys
    causal = False    all queries see the same keys        keys of another rank: no token is on both sides

      keys             keys            causal blocks line up at the lower right corner, as flash kernels do:
    q x . . .        q x x x           the last query of a segment sees all of its keys
    q x x . .        q x x x
    q x x x .                          no pair of different documents is ever computed
    q x x x x

A causal block may have a window: each query sees the last so many of its keys. That is the window of a
sliding layer where a segment's keys are those of consecutive positions: in blocks over the keys of all ranks.

Blocks are derived from the (document, position) of each token alone, so any distribution of tokens over
ranks works, the balanced one of :mod:`fsdmoe.context_parallel.split` being only the one that gives all ranks
equal work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdmoe.context_parallel.split import PADDING, ranges


class AttentionSegment(NamedTuple):
    """Rows of the selected queries and keys: ``[query_start, query_end)`` see ``[key_start, key_end)``."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True)
class Block:
    """One attention call: which queries and keys, in which order, and the borders of its segments."""

    query_index: Tensor | None
    """Rows of the queries, in kernel order; none means all of them as they stand."""
    key_index: Tensor | None
    """Rows of the keys, in kernel order; a row may occur more than once in causal blocks."""
    query_ends: Tensor
    """``[N + 1]`` int32, cumulative, from 0: where each segment's queries end among the selected ones."""
    key_ends: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    window: int | None = None
    """Keys that a query sees at most, the last ones; none sees all up to its own."""

    def windowed(self, window: int | None) -> Block:
        """The same queries and keys, each query with a view of ``window`` keys."""
        if window is not None and not self.causal:
            raise AssertionError(
                "expected keys of consecutive positions under a window, got a block of others"
            )
        return self if window == self.window else replace(self, window=window)

    @cached_property
    def max_queries(self) -> int:
        return max(self.query_lengths)

    @cached_property
    def max_keys(self) -> int:
        return max(self.key_lengths)

    @cached_property
    def is_uniform(self) -> bool:
        """All segments alike (and square, if causal): a plain batch, which dense kernels take."""
        alike = len(set(self.query_lengths)) == 1 and len(set(self.key_lengths)) == 1
        return alike and (not self.causal or self.query_lengths[0] == self.key_lengths[0])

    def segments(self) -> Iterator[AttentionSegment]:
        query = key = 0
        for num_queries, num_keys in zip(self.query_lengths, self.key_lengths, strict=True):
            yield AttentionSegment(query, query + num_queries, key, key + num_keys)
            query, key = query + num_queries, key + num_keys

    def to(self, device: torch.device) -> Block:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        return replace(
            self,
            query_index=move(self.query_index),
            key_index=move(self.key_index),
            query_ends=self.query_ends.to(device, non_blocking=True),
            key_ends=self.key_ends.to(device, non_blocking=True),
        )


def whole_rows(num_rows: int, length: int, device: torch.device) -> Block:
    """The block of rows that are one document each, and all here."""
    ends = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * length
    lengths = (length,) * num_rows
    return Block(None, None, ends, ends, lengths, lengths, causal=True)


def build_block(
    query_document: Tensor,
    query_position: Tensor,
    key_document: Tensor,
    key_position: Tensor,
    *,
    causal: bool,
) -> Block | None:
    """The block between two lists of tokens, or none where no query sees a key.

    ``causal``: whether the keys contain the queries; otherwise the two lists must not share a token.
    """
    query_order, query_code, query_doc = _sorted_tokens(query_document, query_position)
    key_order, key_code, key_doc = _sorted_tokens(key_document, key_position)
    first_key = np.searchsorted(key_doc, query_doc, "left")
    num_seen = np.searchsorted(key_code, query_code, "right") - first_key
    seeing = num_seen > 0
    if not seeing.any():
        return None
    query_order, query_doc = query_order[seeing], query_doc[seeing]
    first_key, num_seen = first_key[seeing], num_seen[seeing]
    goes_on = (np.diff(query_doc) == 0) & (np.diff(num_seen) == int(causal))
    last = np.flatnonzero(np.append(~goes_on, True))
    query_lengths = np.diff(last, prepend=-1)
    key_lengths = num_seen[last]
    key_rows = key_order[ranges(first_key[last], key_lengths)]
    return Block(
        query_index=_index(query_order, len(query_document)),
        key_index=_index(key_rows, len(key_document)),
        query_ends=_ends(query_lengths),
        key_ends=_ends(key_lengths),
        query_lengths=tuple(query_lengths.tolist()),
        key_lengths=tuple(key_lengths.tolist()),
        causal=causal,
    )


def _sorted_tokens(document: Tensor, position: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Real tokens by (document, position): their rows, a code that sorts like the two, their documents."""
    documents, positions = document.numpy(), position.numpy()
    rows = np.flatnonzero(documents != PADDING)
    # Positions of one batch fit in 40 bits, document numbers in 22.
    codes = (documents[rows] << 40) + positions[rows]
    order = np.argsort(codes, kind="stable")
    return rows[order], codes[order], documents[rows][order]


def _index(rows: np.ndarray, num_rows: int) -> Tensor | None:
    """None for the identity, which needs no gathering."""
    if len(rows) == num_rows and (rows == np.arange(num_rows)).all():
        return None
    return torch.from_numpy(rows)


def _ends(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
