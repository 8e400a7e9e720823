"""Spans of documents to rows of tensors.

Rows are full: no token is lost, repeated or padded. A document that reaches past the end of a row goes on in
a later one as a segment of its own: its positions restart at 0, since attention does not reach what came
before, but the last token before the cut still has its true label, the token behind the cut. So every token
of a document but its last has its successor as a label exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fsdmoe.data.batch import Batch
from fsdmoe.data.spans import Spans
from fsdmoe.data.store import TokenStore


def pack_rows(spans: Spans, stores: Sequence[TokenStore], seq_len: int, num_rows: int) -> Batch:
    """Lay the spans over `num_rows` rows. What is left of the rows is padding: a segment without loss."""
    size = num_rows * seq_len
    tokens, labels = np.zeros(size, np.int64), np.zeros(size, np.int64)
    loss_mask = np.zeros(size, np.bool_)
    begins = np.zeros(size, np.bool_)
    begins[::seq_len] = True
    place = 0
    for source, document, start, stop in spans:
        store, end = stores[source], place + stop - start
        # One token more than the span holds: the label of its last token, where the document goes on.
        piece = store.read(document, start, stop + 1)
        num_labels = len(piece) - 1
        wanted = store.read_targets(document, start + 1, stop + 1)
        begins[place] = True
        tokens[place:end] = piece[: stop - start]
        labels[place : place + num_labels] = piece[1:]
        loss_mask[place : place + num_labels] = True if wanted is None else wanted
        place = end
    if place < size:
        begins[place] = True
    labels[~loss_mask] = 0
    indices = np.arange(size)
    positions = indices - np.maximum.accumulate(np.where(begins, indices, 0))
    document_ids = np.cumsum(begins.reshape(num_rows, seq_len), axis=1) - 1
    columns_BS = (tokens, labels, positions, document_ids, loss_mask)
    return Batch(*(torch.from_numpy(column.reshape(num_rows, seq_len)) for column in columns_BS))


def split_rows(batch: Batch, rows_at_once: int) -> list[Batch]:
    """Cut a batch into micro-batches (views of the same memory)."""
    columns = (
        batch.tokens_BS,
        batch.labels_BS,
        batch.positions_BS,
        batch.document_ids_BS,
        batch.loss_mask_BS,
    )
    return [Batch(*parts) for parts in zip(*(column.split(rows_at_once) for column in columns), strict=True)]
