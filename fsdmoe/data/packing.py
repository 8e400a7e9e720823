"""Spans of documents to rows of tensors.

Rows of text are full: no token is lost, repeated or padded. Rows of chats and other records with a loss mask
hold whole records, then padding; with `data.pack = false` a row has one document, and padding behind it (of a
pair, the chosen answer and the rejected one as two segments). A document that reaches
past the end of a row goes on in a later one as a segment of its own: its positions restart at 0, since
attention does not reach what came before, but the last token before the cut still has its true label, the
token behind the cut. So every token of a document but its last has its successor as a label exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fsdmoe.data.batch import Batch
from fsdmoe.data.origin import NO_DOCUMENT, Origin
from fsdmoe.data.spans import NO_SOURCE, Spans
from fsdmoe.data.store import SECOND_BEGINS, TokenStore


def pack_rows(spans: Spans, stores: Sequence[TokenStore], seq_len: int, num_rows: int) -> Batch:
    """Lay the spans over `num_rows` rows. What is left of the rows is padding: a segment without loss."""
    size = num_rows * seq_len
    tokens, labels = np.zeros(size, np.int64), np.zeros(size, np.int64)
    loss_mask = np.zeros(size, np.bool_)
    begins = np.zeros(size, np.bool_)
    begins[::seq_len] = True
    number, offset = np.full(size, NO_DOCUMENT, np.int64), np.zeros(size, np.int64)
    names: dict[str, int] = {}
    place = 0
    for source, document, start, stop in spans:
        end = place + stop - start
        begins[place] = True
        if source == NO_SOURCE:
            place = end
            continue
        store = stores[source]
        # One token more than the span holds: the label of its last token, where the document goes on.
        piece = store.read(document, start, stop + 1)
        num_labels = len(piece) - 1
        wanted = store.read_targets(document, start + 1, stop + 1)
        tokens[place:end] = piece[: stop - start]
        labels[place : place + num_labels] = piece[1:]
        loss_mask[place : place + num_labels] = True if wanted is None else wanted == 1
        if wanted is not None:
            begins[place + 1 : end] |= wanted[: stop - start - 1] == SECOND_BEGINS
        number[place:end] = names.setdefault(document_name(store, document), len(names))
        offset[place:end] = np.arange(start, stop)
        place = end
    if place < size:
        begins[place] = True
    labels[~loss_mask] = 0
    indices = np.arange(size)
    positions = indices - np.maximum.accumulate(np.where(begins, indices, 0))
    document_ids = np.cumsum(begins.reshape(num_rows, seq_len), axis=1) - 1
    columns_BS = (tokens, labels, positions, document_ids, loss_mask)
    origin = Origin(tuple(names), *(torch.from_numpy(column) for column in (number, offset)))
    tokens_BS, labels_BS, positions_BS, ids_BS, mask_BS = (
        torch.from_numpy(column.reshape(num_rows, seq_len)) for column in columns_BS
    )
    rows = origin.map(lambda column: column.view(num_rows, seq_len))
    return Batch(tokens_BS, labels_BS, positions_BS, ids_BS, mask_BS, rows)


def document_name(store: TokenStore, document: int) -> str:
    """What names a document of a data set in files: its source, and its number there."""
    return f"{store.name}/{document}"


def split_rows(batch: Batch, rows_at_once: int) -> list[Batch]:
    """Cut a batch into micro-batches (views of the same memory)."""
    starts = range(0, len(batch.tokens_BS), rows_at_once)
    return [batch.rows(slice(start, start + rows_at_once)) for start in starts]
