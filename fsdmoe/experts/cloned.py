"""Routed experts some of which are cloned: a rank with clones computes them together with its own experts.

::

    sent       rows ── weights of clones ──────────── rows back        backward, from right to left:
    computed                               experts                     gradients of clones travel home while
                                                                       rows' gradients do

See :mod:`fsdmoe.kernels.cloned_products` for how they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from fsdmoe.experts.dispatch import CloningDispatcher, DispatchPlan, FlexCloningDispatcher, Rows
from fsdmoe.experts.dispatch.clone_weights import CloneWeights
from fsdmoe.experts.dispatch.cloning import CloningPlan
from fsdmoe.experts.dispatch.transfer import AsyncCollective
from fsdmoe.experts.routed import Begin, Concurrent, Dispatching, RoutedExperts
from fsdmoe.kernels.expert_operands import ExpertWeights


class Clonable(Protocol):
    """Whatever holds experts of which others may hold clones."""

    def own_weights(self) -> ExpertWeights: ...


class ClonedExperts(RoutedExperts):
    """See the module's text."""

    dispatcher: CloningDispatcher | FlexCloningDispatcher

    def __init__(
        self,
        dispatcher: CloningDispatcher | FlexCloningDispatcher,
        chunks: int = 1,
        transfer_sms: int = 0,
        sub_batches: int = 1,
        *,
        experts: Clonable,
    ) -> None:
        super().__init__(dispatcher, chunks, transfer_sms, sub_batches)
        self._experts = experts

    def start_dispatch(self, rows: Rows, concurrent: Concurrent | None, x_TD: Tensor | None) -> Dispatching:
        plan, leaving, _ = super().start_dispatch(rows, None, None)
        self._send_weights(plan, None)
        return Dispatching(plan, leaving, self._concurrent(concurrent, x_TD))

    def _departures(self, rows: Rows) -> Iterator[tuple[DispatchPlan, AsyncCollective | Rows]]:
        weights: CloneWeights | None = None
        for plan, leaving in super()._departures(rows):
            weights = self._send_weights(plan, weights)
            yield plan, leaving

    def _send_weights(self, plan: DispatchPlan, sent: CloneWeights | None) -> CloneWeights | None:
        """After the rows, which are needed first. All chunks of a layer share what was ``sent`` once."""
        if not isinstance(plan, CloningPlan):  # rows that did not fit
            return sent
        if plan.clones is not None and sent is None:
            keep = self.dispatcher.clones.keep
            sent = CloneWeights(plan.clones, self._experts.own_weights(), keep=keep)
        plan.weights = sent
        return sent

    def _compute(self, plan: DispatchPlan, leaving: AsyncCollective | Rows, begin: Begin) -> Tensor:
        weights: CloneWeights | None = None
        if isinstance(plan, CloningPlan):  # which nodes of autograd may hold until backward
            weights, plan.weights = plan.weights, None
        if weights is None:
            return super()._compute(plan, leaving, begin)
        compute = begin(weights.wait())
        rows = self.dispatcher.gather(plan, leaving)
        return weights.tie(compute(rows, plan.max_rows))
