"""What the data package hands to the model: packed rows of documents, with their boundaries.

A row of eight tokens that ends one document, holds a short one and begins a third (B rows, S tokens a row):

    tokens        h  i  $ | a  $ | n  e  w      $ ends a document
    labels        i  $  0 | $  0 | e  w  x      the next token of the same document; `x` opens the next row
    loss_mask     1  1  0 | 1  0 | 1  1  1      0 where there is no next token, or where no loss is wanted
    positions     0  1  2 | 0  1 | 0  1  2      restart with every document
    document_ids  0  0  0 | 1  1 | 2  2  2      count up within the row; tokens attend only to their own id
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch of packed rows. All tensors are [B, S]; int64, but for the boolean `loss_mask_BS`."""

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    document_ids_BS: Tensor
    loss_mask_BS: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch on `device`; the copy overlaps with compute where the memory is page-locked."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return Batch(**moved)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a copy to the GPU does not stall the host."""
        return Batch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})

    @property
    def num_tokens(self) -> int:
        """B · S, with or without loss."""
        return self.tokens_BS.numel()
