"""Inputs of a micro-batch at fixed addresses: what a graph reads, filled before each replay.

Packed rows differ in where their documents end. The borders go to the attention kernels as a tensor, so they
are an input like any other, but for their number: it is rounded up to a power of four, and the borders beyond
the last document are those of empty ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import AttentionSegment, Block
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.causal_lm import StepCounts

_LEAST_BORDERS = 16
_MASK = "token mask"


class GivenBatch(NamedTuple):
    """All that a micro-batch is computed from."""

    inputs: dict[str, Any]
    """The model's arguments, as a ``Feed`` makes them."""
    counts: StepCounts
    routing: RoutingContext

    def tensors(self) -> dict[str, Tensor]:
        """Those that change from one micro-batch to the next."""
        found = {name: value for name, value in self.inputs.items() if isinstance(value, Tensor)}
        named = enumerate((self.counts.tokens, self.counts.loss_tokens, *self.counts.mtp_tokens))
        found |= {f"count {index}": count for index, count in named}
        if self.routing.prior_load_LE is not None:
            found["prior load"] = self.routing.prior_load_LE
        if self.routing.token_mask_T is not None:
            found[_MASK] = self.routing.token_mask_T
        return found


class ShapeKey(NamedTuple):
    """Micro-batches with the same one can share graphs."""

    columns: tuple[Hashable, ...]
    num_borders: int
    """Of packed rows with a plan; 0 without one."""
    tokens: tuple[int, ...]
    """Rows and tokens a row, for messages."""

    def __str__(self) -> str:
        text = " x ".join(str(size) for size in self.tokens) + " tokens"
        return f"{text}, up to {self.num_borders} packed documents" if self.num_borders else text


def shape_key(batch: GivenBatch) -> ShapeKey | None:
    """None where the host decides more than shapes: rows that several ranks share."""
    columns: tuple[Any, ...] = tuple(
        (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (name, value is None)
        for name, value in batch.inputs.items()
        if name != "split"
    )
    if batch.routing.token_mask_T is not None:
        columns += (_MASK,)
    split, num_borders = batch.inputs.get("split"), 0
    if split is not None:
        if not _has_whole_rows(split):
            return None
        num_borders = _LEAST_BORDERS
        while num_borders < len(split.plan.whole.query_lengths):
            num_borders *= 4
    return ShapeKey(columns, num_borders, tuple(batch.inputs["tokens_BS"].shape))


def _has_whole_rows(split: SplitRows) -> bool:
    """All tokens of the rows are here, in their order, and borders of documents are all that there is to
    know of them."""
    plan = split.plan
    if plan.group is not None or split.by_document or plan.split.num_padding:
        return False
    index_BL = plan.split.index_RBL[0]
    in_order = torch.arange(index_BL.shape[1]).expand_as(index_BL)
    whole = plan.whole
    if whole is None or whole.query_index is not None or whole.key_index is not None:
        return False
    return whole.query_lengths == whole.key_lengths and torch.equal(index_BL, in_order)


class StaticInputs:
    """The inputs of all micro-batches of one shape."""

    def __init__(self, batch: GivenBatch, num_borders: int) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in batch.tensors().items()}
        self._arguments = batch.inputs
        self._routing = batch.routing
        self._plan: _PaddedPlan | None = None
        if num_borders:
            self._plan = _PaddedPlan(batch.inputs["split"].plan, num_borders, batch.counts.tokens.device)
        self.fill(batch)

    def fill(self, batch: GivenBatch) -> None:
        """Take another micro-batch of the same shape."""
        for name, tensor in batch.tensors().items():
            if name not in self._tensors:  # the step's first micro-batch has no prior load
                self._tensors[name] = tensor.clone()
            self._tensors[name].copy_(tensor)
        if self._plan is not None:
            self._plan.fill(batch.inputs["split"].plan)

    def given(self, *, first: bool) -> GivenBatch:
        """What a graph computes from; ``first``: as a step's first micro-batch."""
        return GivenBatch(self.arguments(), self.counts(), self.routing(first=first))

    def arguments(self) -> dict[str, Any]:
        """The model's."""
        found = {name: self._tensors.get(name, value) for name, value in self._arguments.items()}
        if self._plan is not None:
            found["split"] = found["split"]._replace(plan=self._plan)
        return found

    def counts(self) -> StepCounts:
        tokens, loss_tokens, *mtp_tokens = (
            t for name, t in self._tensors.items() if name.startswith("count")
        )
        return StepCounts(tokens, loss_tokens, tuple(mtp_tokens))

    def routing(self, *, first: bool) -> RoutingContext:
        """``first`` micro-batch of a step: nothing was routed before."""
        prior_load_LE = None if first else self._tensors["prior load"]
        return replace(self._routing, prior_load_LE=prior_load_LE, token_mask_T=self._tensors.get(_MASK))


class _PaddedBlock(Block):
    """A block whose borders are on the device alone; the kernels are told the longest document that there may
    be, and that lengths differ."""

    @classmethod
    def of(cls, ends: Tensor, longest: int) -> _PaddedBlock:
        lengths = (longest, *(0 for _ in range(len(ends) - 2)))
        return cls(None, None, ends, ends, lengths, lengths, causal=True)

    def segments(self) -> Iterator[AttentionSegment]:
        raise ConfigError(
            "train.graphs: expected attention to packed rows by a kernel (bfloat16 or float16), got plain "
            'torch, which loops over documents on the host; set context_parallel.varlen = "never", or '
            'train.graphs = "none"'
        )


class _PaddedPlan(AttentionPlan):
    """A plan for whole rows with any documents in them, up to a number."""

    def __init__(self, plan: AttentionPlan, num_borders: int, device: torch.device) -> None:
        super().__init__(plan.split, None, device)
        self._ends = torch.zeros(num_borders + 1, dtype=torch.int32, device=device)
        self._own = plan.own

    def fill(self, plan: AttentionPlan) -> None:
        """Take the documents of another plan."""
        assert plan.whole is not None
        ends, own = plan.whole.query_ends, self._ends.data  # what autograd saved of them is to follow
        own[: len(ends)].copy_(ends)
        own[len(ends) :].copy_(ends[-1:].expand(len(own) - len(ends)))

    @cached_property
    def own(self) -> Any:
        return self._own

    @cached_property
    def whole(self) -> Block:
        return _PaddedBlock.of(self._ends, self.split.seq_len)
