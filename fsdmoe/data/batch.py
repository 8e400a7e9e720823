"""What the data package hands to the model: packed rows of documents, with their boundaries.

A row of eight tokens that ends one document, holds a short one and begins a third (B rows, S tokens a row):

    tokens        h  i  $ | a  $ | n  e  w      $ ends a document
    labels        i  $  0 | $  0 | e  w  x      the next token of the same document; `x` opens the next row
    loss_mask     1  1  0 | 1  0 | 1  1  1      0 where there is no next token, or where no loss is wanted
    positions     0  1  2 | 0  1 | 0  1  2      restart with every document
    document_ids  0  0  0 | 1  1 | 2  2  2      count up within the row; tokens attend only to their own id
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdmoe.data.origin import Origin


@dataclass(frozen=True)
class Batch:
    """One micro-batch of packed rows. All columns are [B, S]; int64, but for the boolean `loss_mask_BS`."""

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    document_ids_BS: Tensor
    loss_mask_BS: Tensor
    origin: Origin | None = None
    """Where the tokens are from; none for tokens without documents that have names."""

    @property
    def columns(self) -> dict[str, Tensor]:
        """By name, without the origin."""
        return {name: column for name, column in vars(self).items() if name != "origin"}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """Every column through `fn`; the origin stays as it is."""
        return Batch(**{name: fn(column) for name, column in self.columns.items()}, origin=self.origin)

    def rows(self, which: slice) -> Batch:
        """Some of the rows: views of the same memory."""
        origin = None if self.origin is None else self.origin.map(lambda column: column[which])
        return Batch(**{name: column[which] for name, column in self.columns.items()}, origin=origin)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch on `device`; the copy overlaps with compute where the memory is page-locked."""
        return self.map(lambda column: column.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a copy to the GPU does not stall the host."""
        return self.map(lambda column: column.pin_memory())

    @property
    def num_tokens(self) -> int:
        """B · S, with or without loss."""
        return self.tokens_BS.numel()
