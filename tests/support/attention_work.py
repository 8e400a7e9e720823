"""Attention work of splits and plans, counted by pairs, and the plan that training has without a planner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.split import PADDING, SequenceSplit
from fsdmoe.context_parallel.step_plan import MicroBatch, StepPlan


def num_pairs(block: Block) -> int:
    """Query-key pairs that are seen, without a window."""
    pairs = sum(q * k for q, k in zip(block.query_lengths, block.key_lengths, strict=True))
    return pairs - sum(q * (q - 1) // 2 for q in block.query_lengths) if block.causal else pairs


def work_R(split: SequenceSplit) -> Tensor:
    """Query-key pairs that each rank's queries see: its attention work, in every mode but all_to_all."""
    visible_RBL = torch.where(split.index_RBL == PADDING, 0, split.position_RBL + 1)
    return visible_RBL.sum((1, 2))


def padding(plan: StepPlan) -> float:
    """Share of the tokens that only fill up ranks' rows to equal lengths inside each micro-batch."""
    held = 0
    for mb in (mb for slot in plan.slots for mb in slot):
        held += mb.size * max(-(-sum(plan.lengths_of(mb)) // mb.size), 1)
    return (held - sum(plan.lengths)) / held


def plan_in_order(lengths: Sequence[int], *, num_ranks: int, size: int, max_tokens: int) -> StepPlan:
    """What training does without a planner: documents as they come, next fit, distributed to equal groups."""
    rows: list[list[int]] = [[]]
    free = size * max_tokens
    for document, length in enumerate(lengths):
        if length > free:
            rows.append([])
            free = size * max_tokens
        rows[-1].append(document)
        free -= length
    num_groups = num_ranks // size
    rows += [[] for _ in range(-len(rows) % num_groups)]
    slots = (
        tuple(MicroBatch(tuple(rows[i + g]), size, g * size) for g in range(num_groups))
        for i in range(0, len(rows), num_groups)
    )
    return StepPlan(tuple(slots), tuple(lengths), num_ranks)
