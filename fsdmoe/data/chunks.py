"""What is shuffled: documents, and the pieces of those that are very long.

A book shuffled as one document would fill batch after batch. So documents above `piece_len` tokens (many
rows' worth) are shuffled in pieces of that length:

    chunk c < N    document c, from its first token
    chunk c >= N   the second and later pieces of the long documents, in order

Only the long documents need a table. Held-out documents keep their numbers and have no length: numbers do not
depend on what is held out, and the order skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdmoe.data.spans import IntArray
from fsdmoe.data.store import TokenStore

_INDEX_BLOCK = 1 << 22

HeldOut = Callable[[TokenStore, IntArray], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of one store."""

    store: TokenStore
    piece_len: int
    held_out: HeldOut
    long_N: IntArray
    """Numbers of the documents that have more than one piece."""
    extra_ends_N: IntArray
    """For these, how many later pieces they and those before them have."""
    num_training_documents: int
    num_training_tokens: int

    @property
    def num_chunks(self) -> int:
        return self.store.num_documents + (int(self.extra_ends_N[-1]) if len(self.extra_ends_N) else 0)

    @property
    def mean_tokens(self) -> float:
        """Training tokens a chunk, held-out chunks counted as empty."""
        return self.num_training_tokens / self.num_chunks

    def locate(self, chunks: IntArray) -> tuple[IntArray, IntArray]:
        """The document of each chunk, and where in it the chunk starts."""
        documents, starts = chunks.copy(), np.zeros_like(chunks)
        later = np.flatnonzero(chunks >= self.store.num_documents)
        if later.size:
            extra = chunks[later] - self.store.num_documents
            entry = np.searchsorted(self.extra_ends_N, extra, side="right")
            first_extra = np.where(entry > 0, self.extra_ends_N[entry - 1], 0)
            documents[later] = self.long_N[entry]
            starts[later] = (extra - first_extra + 1) * self.piece_len
        return documents, starts

    def lengths(self, chunks: IntArray) -> IntArray:
        """Tokens of each chunk; 0 for what is held out."""
        documents, starts = self.locate(chunks)
        lengths = np.minimum(self.store.lengths(documents) - starts, self.piece_len)
        return np.where(self.held_out(self.store, documents), 0, lengths)


def build_chunks(store: TokenStore, piece_len: int, held_out: HeldOut) -> ChunkTable:
    """One pass over a store's index."""
    num_documents, num_tokens = 0, 0
    long_parts, extra_parts = [], []
    for documents in index_blocks(store):
        lengths = store.lengths(documents)
        kept = ~held_out(store, documents)
        num_documents += int(kept.sum())
        num_tokens += int(lengths[kept].sum())
        is_long = lengths > piece_len
        long_parts.append(documents[is_long])
        extra_parts.append((lengths[is_long] - 1) // piece_len)
    extra_ends = np.cumsum(np.concatenate(extra_parts))
    return ChunkTable(
        store, piece_len, held_out, np.concatenate(long_parts), extra_ends, num_documents, num_tokens
    )


def index_blocks(store: TokenStore) -> Iterator[IntArray]:
    """Document numbers, a few million at a time: an index may be larger than memory."""
    for first in range(0, store.num_documents, _INDEX_BLOCK):
        yield np.arange(first, min(first + _INDEX_BLOCK, store.num_documents), dtype=np.int64)
