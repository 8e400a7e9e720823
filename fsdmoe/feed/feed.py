"""Turns micro-batches into a model's arguments, counts the tokens of a step, computes the held-out loss.

All ranks of ``cp`` and ``tp`` get the same whole rows. Which rank takes which tokens is planned here, on the
host and ahead of the step; the model cuts the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import SequenceSplit, split_rows
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.labels import raise_noted_anywhere
from fsdmoe.data import Batch
from fsdmoe.data.origin import NO_DOCUMENT, Origin
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.replay import RoutingTape
from fsdmoe.feed.dynamic import replan_documents
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.causal_lm import CausalLM, StepCounts


class Prepared(NamedTuple):
    """A micro-batch on the host, and how several ranks share its rows; none where they are whole."""

    batch: Batch
    split: SplitRows | None


class Inputs(dict[str, Any]):
    """A model's arguments for one micro-batch, and where its tokens are from."""

    origin: Origin | None = None
    token_mask_BS: Tensor | None = None
    """False for padding; none where there is none."""


class Feed:
    """Turns batches into a model's arguments, for one layout and one way of splitting sequences.

    ``own_attention``: for a wrapped model, which separates packed documents by itself and whose attention
    follows a plan where rows are split, or heads over ``tp``. ``dtype`` is what the model computes in.
    ``experts`` says where routing is recorded or replayed."""

    def __init__(
        self,
        meshes: Meshes,
        config: ContextParallelConfig | None = None,
        experts: ExpertsConfig | None = None,
        *,
        own_attention: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._meshes = meshes
        self._config = config or ContextParallelConfig()
        experts = experts or ExpertsConfig()
        self._tape = RoutingTape.from_config(experts)
        self._record = None if experts.record is None else Path(experts.record).expanduser()
        self._device = meshes.device  # of this thread: plans are made in other threads
        self._attention = ContextAttention(self._config.mode)
        self._groups = meshes.context_groups() if self._config.dynamic else {}
        self._plans_whole_rows = self._config.varlen == "always" or (
            own_attention and meshes.size(Axis.TP) > 1
        )
        has_kernel = self._device.type == "cuda" and dtype.itemsize == 2
        self._plans_packed_rows = self._config.varlen == "auto" and has_kernel and not own_attention
        self._plans_if_followed = self._config.varlen == "auto" and has_kernel and own_attention

    def plan_packed_rows(self, model: CausalLM, seq_len: int) -> None:
        """Plan all rows of a wrapped model that follows plans: its masks cost work across documents.
        Before the first batch; collective."""
        if self._plans_if_followed and model.follow_plans(seq_len):
            self._plans_whole_rows = True

    @property
    def data_axis(self) -> Axis:
        """Ranks along it read different rows."""
        return self._config.data_axis

    def prepare(self, batches: list[Batch]) -> list[Prepared]:
        """The step's micro-batches, as many on every rank. Touches no device and no other rank."""
        meshes = self._meshes
        cp, tp = meshes.size(Axis.CP), meshes.size(Axis.TP)
        if self._config.dynamic:
            rows = replan_documents(
                batches,
                rank=meshes.rank(Axis.FSDP),
                num_ranks=meshes.size(Axis.FSDP),
                sizes=tuple(self._groups),
                max_tokens=self._config.max_tokens,
                multiple_of=tp,
            )
            return [Prepared(row.batch, self._share(row.split)) for row in rows]
        return [self._plan(batch, cp, tp) for batch in batches]

    def _plan(self, batch: Batch, cp: int, tp: int) -> Prepared:
        wanted = cp > 1 or self._plans_whole_rows or (self._plans_packed_rows and _is_packed(batch))
        if not wanted:
            return Prepared(batch, None)
        return Prepared(batch, self._share(split_rows(batch.document_ids_BS, cp, multiple_of=tp)))

    def inputs(self, prepared: Iterable[Prepared]) -> list[Inputs]:
        """The model's arguments on this rank's device, a dict a micro-batch."""
        return [self._arguments(*each) for each in prepared]

    def _arguments(self, batch: Batch, split: SplitRows | None) -> Inputs:
        is_packed = _is_packed(batch)
        batch = batch.to(self._device)
        arguments = Inputs(
            tokens_BS=batch.tokens_BS,
            positions_BS=batch.positions_BS,
            document_ids_BS=batch.document_ids_BS if is_packed else None,
            labels_BS=batch.labels_BS,
            loss_mask_BS=batch.loss_mask_BS,
        )
        arguments.origin = batch.origin
        if batch.origin is not None and (is_padding_BS := batch.origin.document == NO_DOCUMENT).any():
            arguments.token_mask_BS = (~is_padding_BS).to(self._device, non_blocking=True)
        if split is not None:
            arguments["split"] = split
        return arguments

    def _share(self, split: SequenceSplit) -> SplitRows:
        if self._config.dynamic:
            attention, sequence = self._groups[split.size]
        else:
            attention = self._meshes.group(Axis.CP) if split.size > 1 else None
            sequence = self._meshes.group(Axis.SEQUENCE)
        plan = AttentionPlan(split, attention, self._device).build(self._config.mode)
        return SplitRows(plan, self._attention, sequence, by_document=self._config.dynamic)

    def routing(
        self,
        inputs: Inputs | None = None,
        *,
        micro_batch: int = 0,
        prior_load_LE: torch.Tensor | None = None,
    ) -> RoutingContext:
        """What routing needs of the ranks; the model adds what it needs of the rows. Given the inputs of a
        training micro-batch, it is recorded or replayed, as the run is configured."""
        tape = None if inputs is None else self._tape
        origin = None if inputs is None or tape is None else inputs.origin
        if tape is not None and origin is None:
            raise ConfigError(
                "experts.record: expected batches that say which documents their tokens are from "
                "(Batch.origin), got none; give them one to record or replay their routing"
            )
        return RoutingContext(
            micro_batch=micro_batch,
            origin=origin,
            token_mask_T=None if inputs is None else inputs.token_mask_BS,
            replay=tape,
            sequence_group=self._meshes.group(Axis.SEQUENCE),
            global_group=self._meshes.group(Axis.WORLD),
            num_devices=self._meshes.size(Axis.EP),
            prior_load_LE=prior_load_LE,
        )

    def count(self, model: CausalLM, inputs: Sequence[dict[str, Any]]) -> StepCounts:
        """Each loss term's tokens over all ranks and micro-batches, so that gradients are plain sums."""
        return StepCounts.from_vector(self._num_tokens(model, inputs))

    def _num_tokens(self, model: CausalLM, inputs: Sequence[dict[str, Any]]) -> torch.Tensor:
        """The same as whole numbers, which may be zero; in the order of :meth:`CausalLM.count_tokens`."""
        keys = ("labels_BS", "loss_mask_BS", "document_ids_BS")
        counts = [model.count_tokens(*(each[key] for key in keys)) for each in inputs]
        for count, each in zip(counts, inputs, strict=True):
            if (mask_BS := getattr(each, "token_mask_BS", None)) is not None:
                count[0] = mask_BS.sum()
        # Ranks that share rows have all been given them: the first of each group counts.
        counts = [
            count if _is_counted(each.get("split")) else torch.zeros_like(count)
            for count, each in zip(counts, inputs, strict=True)
        ]
        total = torch.stack(counts).sum(0)
        self._meshes.add_up(total, Axis.LOSS)
        return total

    @torch.no_grad()
    def held_out_loss(
        self, model: CausalLM, batches: Iterable[Batch], *, before_each: Callable[[], object] = lambda: None
    ) -> float:
        """Mean next-token loss over this and all other ranks' batches: the sum over their tokens with loss by
        the number of these, so that it does not depend on how they fall on ranks and micro-batches.
        ``before_each``: called before each forward, as often on all ranks; it may raise."""
        model.eval()
        total, num_tokens = torch.zeros(2, device=self._meshes.device, dtype=torch.float64)
        # Documents that are planned again are planned all together: the fewer steps, the better filled.
        groups: Iterable[list[Batch]] = [list(batches)] if self._config.dynamic else ([b] for b in batches)
        for group in groups:
            inputs = self.inputs(self.prepare(group))
            counted = self._num_tokens(model, inputs)
            counts = StepCounts.from_vector(counted)
            for each in inputs:
                before_each()
                routing = replace(self.routing(), token_mask_T=each.token_mask_BS)
                out = model(**each, counts=counts, routing=routing)
                total += out.cross_entropy.double() * counts.loss_tokens
            num_tokens += counted[1]  # not the divisor, which is one where no token has a loss
        model.train()
        self._meshes.add_up(total, Axis.LOSS)
        if not num_tokens.item():
            raise ConfigError(
                "data.holdout: expected held-out rows with tokens that have a loss, got none; raise "
                "data.holdout or train.eval_batches, or set train.eval_interval = -1 to evaluate never"
            )
        loss = (total / num_tokens).item()
        self.require_labels(loss)
        return loss

    def end_step(self, step: int, loss: float) -> None:
        """Once all ranks have read the loss of training step ``step`` (counted from 0): write its routing
        where that is recorded, and raise where a label was at fault."""
        self.require_labels(loss)
        if self._tape is not None and self._record is not None:
            self._tape.flush(self._file_of(step, self._meshes.rank(Axis.WORLD)))
            # Of a run with more ranks that came this far and is resumed from before: its tokens are ours now.
            rank = self._meshes.size(Axis.WORLD)
            while self._meshes.rank(Axis.WORLD) == 0 and self._file_of(step, rank).exists():
                self._file_of(step, rank).unlink()
                rank += 1

    def _file_of(self, step: int, rank: int) -> Path:
        assert self._record is not None
        return self._record / f"step-{step:08d}-rank-{rank:05d}.safetensors"

    def require_labels(self, loss: float) -> None:
        """Raise on all ranks if a label outside of the vocabulary is why the loss, which all ranks read, is
        not a number."""
        if not math.isfinite(loss):
            raise_noted_anywhere()


def _is_packed(batch: Batch) -> bool:
    """Rows of one document each need no document mask."""
    return bool(batch.document_ids_BS[:, -1].any())


def _is_counted(split: SplitRows | None) -> bool:
    return split is None or (split.plan.rank == 0 and split.plan.split.seq_len > 0)
