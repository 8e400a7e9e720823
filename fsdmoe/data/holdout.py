"""The held-out slice: documents that evaluation reads and training never sees.

A document is held out when its hash falls below a threshold. The hash is of the content, so that copies of a
held-out document are held out with it, and neither the seed, the mixture nor the order of the files moves
the line. (Pre-tokenised documents are hashed by number.) A corpus too small for its fraction gives at least
one document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.chunks import ChunkTable, build_chunks, index_blocks
from fsdmoe.data.spans import IntArray, Spans
from fsdmoe.data.store import TokenStore


class Holdout:
    """Splits stores into a training part and a held-out part."""

    def __init__(self, stores: Sequence[TokenStore], fraction: float) -> None:
        self.stores, self.fraction = tuple(stores), fraction
        limit = int(fraction * 2.0**64)
        if limit > 0:
            limit = max(limit, min(int(store.hashes.min()) for store in stores) + 1)
        self._limit = np.uint64(min(limit, 2**64 - 1))

    def is_held_out(self, store: TokenStore, documents: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these documents are kept for evaluation."""
        return store.hashes[documents] < self._limit

    def training_chunks(self, store: TokenStore, piece_len: int) -> ChunkTable:
        """The chunks of a store that training reads."""
        return build_chunks(store, piece_len, self.is_held_out)

    def require_training(self, tables: Sequence[ChunkTable]) -> None:
        """Refuse to train where a store has no document for it; ``tables`` are those of the stores."""
        for store, table in zip(self.stores, tables, strict=True):
            if table.num_training_documents == 0:
                raise ConfigError(
                    f"data.holdout: all {store.num_documents} document(s) of {store.name} are held out and "
                    "none is left to train on; cut the files into documents (data.separator; of token ids "
                    "data.document_end, or a file x.offsets.npy next to x.npy), add some, or set "
                    "data.holdout = 0"
                )

    def documents(self) -> Spans:
        """Every held-out document."""
        parts = []
        for number, store in enumerate(self.stores):
            found = [block[self.is_held_out(store, block)] for block in index_blocks(store)]
            documents = np.concatenate(found)
            zeros = np.zeros_like(documents)
            parts.append(Spans(zeros + number, documents, zeros, store.lengths(documents)))
        return Spans.join(parts)
