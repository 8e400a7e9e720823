"""Ranks with different numbers of batches: a rank that is done takes part without rows until all are done.

All ranks of a sharded model run the same layers in every step, because each holds a part of the weights. If a
rank left its loop early, the others would wait for it forever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map_only

from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import Meshes

Batch = TypeVar("Batch")


def join_batches(batches: Iterable[Batch], meshes: Meshes) -> Iterator[Batch]:
    """This rank's batches, then ones without rows until the last rank is done. Collective: one small exchange
    before each batch, so all ranks iterate over one, and none leaves early.

    A batch without rows is this rank's last one with every tensor cut to no rows (``tensor[:0]``). A wrapped
    model of transformers runs on it, and its loss and gradient are zero.

    Args:
        batches: What this rank reads, for example a ``DataLoader``.
        meshes: From ``build_meshes``, which starts the process group that ranks exchange through.

    Yields:
        As many batches on every rank as the longest of them has.

    Raises:
        ConfigError: A rank has no batch at all; on all ranks.
    """
    iterator, last = iter(batches), None
    while True:
        batch = next(iterator, None)
        having = from_all_ranks(batch is not None)
        if not any(having):
            return
        if last is None and not all(having):  # the first exchange: all ranks find it
            raise ConfigError(
                "join_batches: expected a batch or more on every rank, got none on rank "
                f"{having.index(False)}; give it rows, or start with fewer ranks"
            )
        last = batch if batch is not None else tree_map_only(torch.Tensor, _without_rows, last)
        yield last


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0] if tensor.dim() else tensor
