"""The plan of a step: which documents share a micro-batch, on how many ranks, in which order; and what that
costs.

A step is a list of *slots*. All ranks run the same slots one after the other (sharded weights and experts
keep them in step, so a slot lasts as long as its slowest rank). Inside a slot the ranks fall into aligned
groups, and each group runs one micro-batch, split over its ranks::

    rank        0        1        2        3        4        5        6        7
    slot 0    [ short ][ short ][ short ][ short ][ short ][ short ][ short ][ short ]      cp 1
    slot 1    [ one long document                ][ two of half the length            ]     cp 4
    slot 2    [ medium         ][ medium         ][ medium         ][ medium          ]     cp 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdmoe.context_parallel.cost import CostModel


@dataclass(frozen=True)
class MicroBatch:
    """Documents (numbers into the batch) that ``size`` ranks from ``first_rank`` on run together."""

    documents: tuple[int, ...]
    size: int
    first_rank: int

    @property
    def ranks(self) -> slice:
        return slice(self.first_rank, self.first_rank + self.size)


@dataclass(frozen=True)
class StepPlan:
    """All micro-batches of a step: each of ``slots`` covers every rank once."""

    slots: tuple[tuple[MicroBatch, ...], ...]
    lengths: tuple[int, ...]
    num_ranks: int

    def of_rank(self, rank: int) -> list[MicroBatch]:
        """What one rank runs, in order. A micro-batch without documents is still run, on padding."""
        return [next(mb for mb in slot if mb.first_rank <= rank < mb.ranks.stop) for slot in self.slots]

    def lengths_of(self, micro_batch: MicroBatch) -> list[int]:
        return [self.lengths[document] for document in micro_batch.documents]

    def seconds(self, cost: CostModel) -> float:
        """Duration of the step, one layer."""
        return sum(max(self._seconds(mb, cost) for mb in slot) for slot in self.slots)

    def _seconds(self, micro_batch: MicroBatch, cost: CostModel) -> float:
        lengths, size = self.lengths_of(micro_batch), micro_batch.size
        attention = sum(cost.attention_seconds(length, size) for length in lengths)
        return float(cost.micro_batch_seconds(attention, sum(lengths), size))

    def work_of_ranks(self) -> np.ndarray:
        """Query-key pairs of each rank in the step, split evenly inside each micro-batch."""
        work = np.zeros(self.num_ranks)
        for mb in (mb for slot in self.slots for mb in slot):
            work[mb.ranks] += sum(n * (n + 1) // 2 for n in self.lengths_of(mb)) / mb.size
        return work


def imbalance(work: np.ndarray) -> float:
    """(most - least) over the mean."""
    return float((work.max() - work.min()) / work.mean())
