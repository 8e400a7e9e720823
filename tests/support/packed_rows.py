"""The same document among other neighbours: what a model's loss for it must not depend on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdmoe.data import Batch
from tests.support.moe_families import VOCABULARY

WATCHED = 24
"""Tokens of the document that carries the loss."""


def neighbourhoods() -> dict[str, Batch]:
    """One row each, all of the same length; losses are those of the watched document alone."""
    random = torch.Generator().manual_seed(5)

    def document(length: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (length,), generator=random)

    watched, first = document(WATCHED), document(9)
    return {
        "behind one": _row([first, watched, document(7)], 1),
        "behind another": _row([document(9), watched, document(7)], 1),
        "moved": _row([document(14), watched, document(2)], 1),
        "behind two": _row([document(5), first, watched, document(2)], 2),
        "before one": _row([watched, document(16)], 0),
    }


def _row(documents: list[Tensor], watched: int) -> Batch:
    lengths = torch.tensor([len(document) for document in documents])
    tokens_S = torch.cat(documents)
    ids_S = torch.arange(len(documents)).repeat_interleave(lengths)
    positions_S = torch.cat([torch.arange(len(document)) for document in documents])
    is_last_S = torch.cat([torch.arange(len(document)) == len(document) - 1 for document in documents])
    mask_S = (ids_S == watched) & ~is_last_S
    labels_S = tokens_S.roll(-1).masked_fill(~mask_S, 0)
    return Batch(*(column[None] for column in (tokens_S, labels_S, positions_S, ids_S, mask_S)))


def losses(decoder: Any) -> dict[str, float]:
    """Of the watched document, by its neighbours."""
    return {name: decoder(**batch.columns).cross_entropy.item() for name, batch in neighbourhoods().items()}


def largest_change(by_neighbours: dict[str, float]) -> float:
    return max(by_neighbours.values()) - min(by_neighbours.values())
