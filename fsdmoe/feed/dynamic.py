"""The step's documents, planned anew: which share a row, on how many ranks, in which micro-batch.

Every rank of a replica reads the same rows, takes the documents out of them and computes the same plan; each
micro-batch is one row of whole documents that an aligned group of ranks shares. The rows of a batch are only
how documents are delivered: a document that was cut at the end of a row stays cut there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch

from fsdmoe.context_parallel.cost import CostModel
from fsdmoe.context_parallel.planner import plan_step
from fsdmoe.context_parallel.split import SequenceSplit, document_lengths, split_documents
from fsdmoe.data import Batch


class SharedRow(NamedTuple):
    """One row of documents and how ``split.size`` ranks share it."""

    batch: Batch
    split: SequenceSplit


def replan_documents(
    batches: Sequence[Batch],
    *,
    rank: int,
    num_ranks: int,
    sizes: Sequence[int],
    max_tokens: int,
    multiple_of: int = 1,
) -> list[SharedRow]:
    """This rank's micro-batches of a step; all ranks get equally many."""
    columns = {
        f.name: torch.cat([getattr(batch, f.name).flatten() for batch in batches]) for f in fields(Batch)
    }
    rows = [row for batch in batches for row in document_lengths(batch.document_ids_BS)]
    lengths = np.concatenate(rows).tolist()
    starts = [0, *itertools.accumulate(lengths)]
    plan = plan_step(lengths, num_ranks=num_ranks, sizes=sizes, max_tokens=max_tokens, cost=CostModel())
    shared = []
    for micro_batch in plan.of_rank(rank):
        own = plan.lengths_of(micro_batch)
        split = split_documents([own], micro_batch.size, multiple_of=multiple_of)
        places = [torch.arange(starts[d], starts[d + 1]) for d in micro_batch.documents]
        row = {name: column[torch.cat(places)] for name, column in columns.items()} if places else _empty()
        if places:
            row["document_ids_BS"] = torch.arange(len(own)).repeat_interleave(torch.tensor(own))
        shared.append(SharedRow(Batch(**{name: column[None] for name, column in row.items()}), split))
    return shared


def _empty() -> dict[str, torch.Tensor]:
    """A row without documents: one token that no rank's piece holds, so that there is something to index."""
    return {
        f.name: torch.zeros(1, dtype=torch.bool if "mask" in f.name else torch.int64) for f in fields(Batch)
    }
