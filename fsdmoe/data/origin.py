"""Which document each token is from, and its place there: what names a token under any packing and mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DOCUMENT = -1
"""The document of padding."""


@dataclass(frozen=True)
class Origin:
    """Of the tokens of a batch, in its shape. It stays on the host, where whoever reads it works."""

    names: tuple[str, ...]
    """Documents; no two tokens of a batch come from the same place in a document."""
    document: Tensor
    """int64: index into ``names``, or NO_DOCUMENT."""
    offset: Tensor
    """int64: place in the document, counted from its beginning wherever a row cut it."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Origin:
        """The same of other tokens, or in another shape."""
        return Origin(self.names, fn(self.document), fn(self.offset))

    @classmethod
    def of_rows(cls, names: Sequence[str], lengths: Sequence[int], row_length: int) -> Origin:
        """Rows ``[B, S]`` of one document each, from its beginning; what is behind it is padding."""
        offset_BS = torch.arange(row_length).repeat(len(names), 1)
        document_BS = torch.arange(len(names))[:, None].expand_as(offset_BS)
        is_padding_BS = offset_BS >= torch.tensor(lengths)[:, None]
        return cls(tuple(names), document_BS.masked_fill(is_padding_BS, NO_DOCUMENT), offset_BS)

    @staticmethod
    def join(parts: Sequence[Origin]) -> Origin:
        """Those of several batches as one column."""
        numbers: dict[str, int] = {}
        documents = []
        for part in parts:
            # One entry more than there are names: padding, whose index is -1, keeps it.
            new = [numbers.setdefault(name, len(numbers)) for name in part.names]
            documents.append(torch.tensor([*new, NO_DOCUMENT])[part.document.flatten()])
        return Origin(
            tuple(numbers), torch.cat(documents), torch.cat([part.offset.flatten() for part in parts])
        )
