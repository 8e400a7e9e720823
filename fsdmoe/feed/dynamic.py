"""The step's documents, planned again: which share a row, on how many ranks, in which micro-batch.

Every rank of a replica reads the same rows, takes the documents out of them and computes the same plan; each
micro-batch is one row of whole documents that an aligned group of ranks shares. The rows of a batch are only
how documents are delivered: a document that was cut at the end of a row stays cut there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fsdmoe.context_parallel.cost import CostModel
from fsdmoe.context_parallel.planner import plan_step
from fsdmoe.context_parallel.split import SequenceSplit, document_lengths, split_documents
from fsdmoe.data import Batch
from fsdmoe.data.origin import NO_DOCUMENT, Origin


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
        name: torch.cat([batch.columns[name].flatten() for batch in batches]) for name in batches[0].columns
    }
    known = [batch.origin for batch in batches if batch.origin is not None]
    origin = Origin.join(known) if len(known) == len(batches) else None
    rows = [row for batch in batches for row in document_lengths(batch.document_ids_BS)]
    lengths = np.concatenate(rows).tolist()
    starts = [0, *itertools.accumulate(lengths)]
    plan = plan_step(lengths, num_ranks=num_ranks, sizes=sizes, max_tokens=max_tokens, cost=CostModel())
    shared = []
    for micro_batch in plan.of_rank(rank):
        own = plan.lengths_of(micro_batch)
        split = split_documents([own], micro_batch.size, multiple_of=multiple_of)
        places = [torch.arange(starts[d], starts[d + 1]) for d in micro_batch.documents]
        if not places:
            shared.append(SharedRow(_empty_row(), split))
            continue
        which_1S = torch.cat(places)[None]
        row = {name: column[which_1S] for name, column in columns.items()}
        row["document_ids_BS"] = torch.arange(len(own)).repeat_interleave(torch.tensor(own))[None]
        own_origin = None if origin is None else origin.map(functools.partial(torch.take, index=which_1S))
        shared.append(SharedRow(Batch(**row, origin=own_origin), split))
    return shared


def _empty_row() -> Batch:
    """A row without documents: one token that no rank's piece holds, so that there is something to index."""
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return Batch(
        nothing, nothing, nothing, nothing, nothing.bool(), Origin((), nothing + NO_DOCUMENT, nothing)
    )
