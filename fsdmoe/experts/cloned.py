"""Routed experts some of which are cloned: own rows and those of clones are computed one after the other.

::

    sent       rows ── weights of clones ────────── rows back          backward, from right to left:
    computed             own experts ── clones ──                      gradients of clones travel home behind
                                                                       the own experts' backward

A rank's own experts keep their weights, sinks and schedule. Rows of clones are a second, smaller call, and
its outputs are added to the rows that need them; nothing of it is as long as all rows of the rank.

Sizes: R rows that reached this rank, M of them with clones (and rows of zeros up to the number of pairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from fsdmoe.experts.dispatch import DispatchPlan, Rows
from fsdmoe.experts.dispatch.clone_weights import CloneWeights
from fsdmoe.experts.dispatch.cloning import CloningDispatcher, CloningPlan
from fsdmoe.experts.dispatch.transfer import AsyncCollective
from fsdmoe.experts.routed import Begin, Concurrent, Dispatching, RoutedExperts
from fsdmoe.kernels.expert_operands import ExpertWeights


class Clonable(Protocol):
    """Whatever holds experts of which others may hold clones."""

    def own_weights(self) -> ExpertWeights: ...

    def compute_clones(self, rows: Rows, weights: ExpertWeights, max_rows: int) -> Tensor: ...


class ClonedExperts(RoutedExperts):
    """See the module's text."""

    dispatcher: CloningDispatcher

    def __init__(
        self,
        dispatcher: CloningDispatcher,
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
        assert isinstance(plan, CloningPlan)
        if plan.clones is not None and sent is None:
            link = self.dispatcher.links.ep
            keep = self.dispatcher.policy.keep
            sent = CloneWeights(link, plan.clones, self._experts.own_weights(), keep=keep)
        plan.weights = sent
        return sent

    def _compute(self, plan: DispatchPlan, leaving: AsyncCollective | Rows, begin: Begin) -> Tensor:
        assert isinstance(plan, CloningPlan)
        assert plan.max_rows is not None
        weights = plan.weights
        if weights is None:
            return super()._compute(plan, leaving, begin)
        compute = begin()
        rows = self.dispatcher.gather(plan, leaving)
        num_own = self.dispatcher.num_own_experts
        is_own_RK = rows.ids_RK < num_own
        own = rows._replace(ids_RK=rows.ids_RK.masked_fill(~is_own_RK, -1))
        if not plan.clone_rows:
            y_RD = compute(own, plan.max_rows)
            weights.wait()
            return weights.tie(y_RD)
        clones_RK = (rows.ids_RK - num_own).masked_fill(is_own_RK, -1)
        index_M, ids_MK = _rows_with_clones(clones_RK, plan.clone_rows)
        x_RD, x_MD = _Pick.apply(rows.x_RD, index_M)
        y_RD = compute(own._replace(x_RD=x_RD), plan.max_rows - plan.clone_rows)
        picked = Rows(x_MD, rows.weights_RK.index_select(0, index_M), ids_MK)
        received = weights.wait()
        with weights.unsaved():
            y_MD = self._experts.compute_clones(picked, received, plan.clone_rows)
        return weights.tie(_Add.apply(y_RD, y_MD, index_M))


def _rows_with_clones(clones_RK: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Which rows have clones, and their ids. There are as many rows as there can be: what is left over is
    row 0 without ids, whose output is zero."""
    num_rows = len(clones_RK)
    size = min(num_rows, num_pairs)
    has_R = (clones_RK >= 0).any(1)
    place_R = torch.where(has_R, has_R.cumsum(0) - 1, size)
    numbers_R = torch.arange(num_rows, device=clones_RK.device)
    index_M = numbers_R.new_full((size + 1,), -1).scatter_(0, place_R, numbers_R)[:size]
    is_left = (index_M < 0).unsqueeze(1)
    index_M = index_M.clamp(min=0)
    return index_M, clones_RK.index_select(0, index_M).masked_fill(is_left, -1)


class _Pick(torch.autograd.Function):
    """All rows, and those with clones."""

    @staticmethod
    def forward(ctx, x_RD, index_M):
        ctx.save_for_backward(index_M)
        ctx.set_materialize_grads(False)
        return x_RD.view_as(x_RD), x_RD.index_select(0, index_M)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx_RD, dx_MD):
        if dx_RD is None or dx_MD is None:
            raise AssertionError("expected gradients of the rows of experts and of clones, got one of them")
        # In place: the experts' backward made it, and nobody else has it. One addend that is not zero a row.
        return dx_RD.index_add_(0, ctx.saved_tensors[0], dx_MD), None


class _Add(torch.autograd.Function):
    """Outputs of clones to those of the experts, in place."""

    @staticmethod
    def forward(ctx, y_RD, y_MD, index_M):
        # Not saved: a layer that is run again in backward would have to come as far as here to find it.
        ctx.index_M = index_M
        ctx.mark_dirty(y_RD)
        return y_RD.index_add_(0, index_M, y_MD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_RD):
        return dy_RD, dy_RD.index_select(0, ctx.index_M), None
