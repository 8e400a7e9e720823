"""Which tokens of a packed row each context-parallel rank holds.

Causal attention costs a token as much as it has predecessors, so every *document* is cut into ``2 * size``
chunks and each rank takes one early and one late chunk of it, a "pair". Size 2, a document of 8 and one of 3
tokens::

    row         a0 a1 a2 a3 a4 a5 a6 a7 | b0 b1 b2           work a rank: its tokens' positions + 1
    chunks       0  0  1  1  2  2  3  3 |  0  1  3
    rank 0      a0 a1 a6 a7   b0 b2                           1+2+7+8 + 1+3 = 22
    rank 1      a2 a3 a4 a5   b1 (pad)                        3+4+5+6 + 2   = 20

Cutting the row instead of its documents would balance one long document and nothing else. Lengths that
``2 * size`` does not divide (shorter documents included) leave chunks one token longer than others; those go
to the ranks that hold fewest tokens of the row, and among equals the heavier pair goes to the rank with the
least work so far. So ranks differ by at most one token a row, and rows whose length ``size`` divides need no
padding at all.

Everything here is a pure function of the document lengths: every rank computes the same split without
communication. Columns that were computed before the split (labels, positions, loss mask) go with their
tokens, so the label of the last token of a chunk is still the first token of the next one, wherever that
went.

Shape suffixes: R ranks, B rows, S tokens of a whole row, L tokens of a row on one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.errors import ConfigError

PADDING = -1
"""The document id (and the place in the row) of a token that is only there to fill a rank's row."""

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class SequenceSplit:
    """The tokens of every rank, as places in the whole rows; padding stands at the end of a rank's row."""

    index_RBL: Tensor
    """Place in the whole row, or PADDING."""
    document_RBL: Tensor
    """Number of the document, counted through all rows, or PADDING."""
    position_RBL: Tensor
    """Place in the document (0 for padding)."""
    seq_len: int

    @property
    def size(self) -> int:
        """How many ranks share the rows."""
        return self.index_RBL.shape[0]

    @property
    def num_rows(self) -> int:
        return self.index_RBL.shape[1]

    @property
    def local_len(self) -> int:
        """Tokens of a row on one rank, the same on all of them."""
        return self.index_RBL.shape[2]

    @cached_property
    def num_padding(self) -> int:
        """Tokens added over all ranks and rows to make the ranks' rows equally long."""
        return int((self.index_RBL == PADDING).sum())

    @cached_property
    def num_documents(self) -> int:
        """Of all rows; at least one, so that there is something to count by."""
        return max(int(self.document_RBL.max()) + 1, 1)

    def part(self, rows: slice) -> SequenceSplit:
        """Some of the rows; documents keep their numbers."""
        return dataclasses.replace(
            self,
            index_RBL=self.index_RBL[:, rows],
            document_RBL=self.document_RBL[:, rows],
            position_RBL=self.position_RBL[:, rows],
        )

    def shard(self, x_BS: Tensor, rank: int, fill: int | float | bool = 0) -> Tensor:
        """This rank's ``[B, L, ...]`` of whole rows ``[B, S, ...]``; ``fill`` where there is no token."""
        return pick(x_BS, self.index_RBL[rank].to(x_BS.device), is_padded=self.num_padding > 0, fill=fill)

    def unshard(self, x_RBL: Tensor | Sequence[Tensor]) -> Tensor:
        """The inverse: whole rows ``[B, S, ...]`` from every rank's ``[B, L, ...]``."""
        stacked = x_RBL if isinstance(x_RBL, Tensor) else torch.stack(list(x_RBL))
        index_RBL = self.index_RBL.to(stacked.device)
        ranks, rows, places = (index_RBL != PADDING).nonzero(as_tuple=True)
        whole = stacked.new_zeros(self.num_rows, self.seq_len, *stacked.shape[3:])
        whole[rows, index_RBL[ranks, rows, places]] = stacked[ranks, rows, places]
        return whole

    def gather(self, x_BL: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Whole rows on every rank, from each rank's own ``[B, L, ...]`` (no gradients flow through)."""
        if group is None:
            return self.unshard(x_BL[None])
        pieces = [torch.empty_like(x_BL, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(pieces, x_BL.detach().contiguous(), group=group)
        return self.unshard(pieces)


def pick(x_BS: Tensor, index_BL: Tensor, *, is_padded: bool, fill: int | float | bool = 0) -> Tensor:
    """The tokens of whole rows ``[B, S, ...]`` that stand at ``index``; ``fill`` where that is PADDING."""
    rows_B1 = torch.arange(index_BL.shape[0], device=x_BS.device)[:, None]
    picked = x_BS[rows_B1, index_BL.clamp(min=0)]
    if not is_padded:
        return picked
    padding = (index_BL == PADDING).view(*index_BL.shape, *[1] * (x_BS.dim() - 2))
    return picked.masked_fill(padding, fill)


def split_rows(document_ids_BS: Tensor, size: int, *, multiple_of: int = 1) -> SequenceSplit:
    """Split packed rows over ``size`` ranks; a document is a range of equal ids in a row.

    ``multiple_of``: each rank's row is padded to a multiple of this (the tensor-parallel size under sequence
    parallelism).
    """
    return split_documents(document_lengths(document_ids_BS), size, multiple_of=multiple_of)


def document_lengths(document_ids_BS: Tensor) -> list[np.ndarray]:
    """Of the documents of each row: ranges of equal ids."""
    ids_BS = document_ids_BS.cpu().numpy()
    return [np.diff(np.flatnonzero(np.diff(row, prepend=row[0] - 1, append=row[-1] + 1))) for row in ids_BS]


def split_documents(
    rows: Sequence[Sequence[int] | np.ndarray], size: int, *, multiple_of: int = 1
) -> SequenceSplit:
    """Split rows given as the lengths of their documents. Rows may differ in length; the rest is padding."""
    if size < 1 or multiple_of < 1:
        raise ConfigError(
            f"mesh.cp: expected a positive number, got {size} (rows padded to {multiple_of}); write 1"
        )
    seq_len = max((int(np.sum(row)) for row in rows), default=0)
    local_len = -(-seq_len // size)
    local_len = max(-(-local_len // multiple_of), 1) * multiple_of
    columns = np.full((3, size, len(rows), local_len), PADDING, np.int64)
    columns[2] = 0
    load_R = np.zeros(size, np.int64)
    num_documents = 0
    for row_number, row in enumerate(rows):
        lengths = np.asarray(row, np.int64)
        starts_DR2, sizes_DR2 = _chunks(lengths, size, load_R)
        document_starts = np.cumsum(lengths) - lengths
        for rank in range(size):
            starts, sizes = starts_DR2[:, rank].reshape(-1), sizes_DR2[:, rank].reshape(-1)
            positions = ranges(starts, sizes)
            documents = np.repeat(np.arange(len(lengths)), sizes.reshape(-1, 2).sum(1))
            columns[0, rank, row_number, : len(positions)] = document_starts[documents] + positions
            columns[1, rank, row_number, : len(positions)] = documents + num_documents
            columns[2, rank, row_number, : len(positions)] = positions
        num_documents += len(lengths)
    index, document, position = torch.from_numpy(columns)
    return SequenceSplit(index, document, position, seq_len)


def shard_batch(batch: BatchT, split: SequenceSplit, rank: int) -> BatchT:
    """A dataclass of ``[B, S]`` columns, cut to this rank's tokens.

    Padding is token 0 without loss, in a document of its own (its ``document_ids…`` column reads PADDING).
    """
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(batch):  # type: ignore[arg-type]
        value = getattr(batch, field.name)
        fill = PADDING if field.name.startswith("document_ids") else 0
        if isinstance(value, Tensor):
            columns[field.name] = split.shard(value, rank, fill)
        elif value is not None:
            # Where the tokens are from: columns of its own, whose padding has no document.
            columns[field.name] = value.map(lambda column: split.shard(column, rank, PADDING))
    return dataclasses.replace(batch, **columns)  # type: ignore[type-var]


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """``[start, start + size)`` of every pair, one after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def _chunks(lengths_D: np.ndarray, size: int, load_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start (in the document) and size of each rank's early and late chunk, both ``[D, R, 2]``.

    ``load_R`` is the work of each rank so far; it is brought up to date.
    """
    pair_C = np.arange(size)
    base_D1, rest_D1 = (part[:, None] for part in np.divmod(lengths_D, 2 * size))
    early_DC = base_D1 + (pair_C < np.minimum(rest_D1, size))
    late_DC = base_D1 + (pair_C < rest_D1 - size)
    early_start_DC = np.cumsum(early_DC, 1) - early_DC
    # Late chunks stand in reverse order: the pair with the earliest early chunk has the latest late one.
    late_start_DC = lengths_D[:, None] - np.cumsum(late_DC, 1)
    starts_DC2 = np.stack((early_start_DC, late_start_DC), 2)
    sizes_DC2 = np.stack((early_DC, late_DC), 2)
    work_DC = (sizes_DC2 * starts_DC2 + sizes_DC2 * (sizes_DC2 + 1) // 2).sum(2)
    pair_DR = np.tile(pair_C, (len(lengths_D), 1))
    count_R = np.zeros(size, np.int64)
    for document, num_longer in enumerate(rest_D1[:, 0] % size):
        if rest_D1[document, 0]:
            pair_DR[document] = _deal(work_DC[document], int(num_longer), count_R, load_R)
            count_R[:] += sizes_DC2[document].sum(1)[pair_DR[document]]
        else:
            count_R += 2 * base_D1[document, 0]
        load_R += work_DC[document][pair_DR[document]]
    documents_D1 = np.arange(len(lengths_D))[:, None]
    return starts_DC2[documents_D1, pair_DR], sizes_DC2[documents_D1, pair_DR]


def _deal(work_C: np.ndarray, num_longer: int, count_R: np.ndarray, load_R: np.ndarray) -> np.ndarray:
    """Which pair each rank takes; the first ``num_longer`` pairs hold one token more than the others."""
    by_count = np.lexsort((load_R, count_R))
    pair_R = np.empty_like(count_R)
    for ranks, pairs in (
        (by_count[:num_longer], np.arange(num_longer)),
        (by_count[num_longer:], np.arange(num_longer, len(work_C))),
    ):
        light_first = ranks[np.argsort(load_R[ranks], kind="stable")]
        heavy_first = pairs[np.argsort(-work_C[pairs], kind="stable")]
        pair_R[light_first] = heavy_first
    return pair_R
