"""Sends each token once to every EP rank that holds at least one of its experts, by all-to-all-v.

A row carries all K ids and weights of its token; the receiver sees -1 for experts of other ranks. A rank sums
its experts' outputs before it sends them back. So a token whose K experts live on fewer than K ranks needs
fewer than K rows each way::

    token t, K = 4, owners of its experts  [2, 0, 2, 3]   ->   rows (t, rank 0), (t, rank 2), (t, rank 3)

Rows are sent in order of rank, then of token. One small all-gather of counts gives the split sizes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.experts.dispatch.base import CountingDispatcher, Departure, DispatchPlan, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective, Exchange
from fsdmoe.kernels.permute import RowPermutation, sum_rows, take_rows, unpermute
from fsdmoe.kernels.send_order import order_rows


class AllToAllDispatcher(CountingDispatcher):
    """All-to-all-v over EP, and back."""

    name = "all_to_all"
    phases: ClassVar[tuple[str, str]] = ("dispatch", "combine")
    """As which its two exchanges are counted."""

    def _departure(self, rows: Rows, counted: tuple[Tensor, Tensor]) -> Departure:
        return Sorted(rows, counted, self.num_local_experts)

    def _rows_to(self, counts: list[int], ep_rank: int) -> int:
        return counts[ep_rank]

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        transfer = Exchange(self.links.ep, self.phases[0], plan.rows_sent, plan.rows_received)
        return AsyncCollective.start(self._outward(transfer), *rows)

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        transfer = Exchange(self.links.ep, self.phases[1], plan.rows_received, plan.rows_sent)
        return AsyncCollective.start(self._homeward(transfer), y_RD)

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        assert plan.permutation is not None
        return unpermute(super().restore(plan, started), plan.permutation)


class Sorted(Departure):
    """One row a (token, rank) pair; ids as the receiving rank counts its experts."""

    def __init__(self, rows: Rows, counted: tuple[Tensor, Tensor], experts_per_rank: int) -> None:
        super().__init__(rows)
        self._order = order_rows(rows.weights_RK.detach(), rows.ids_RK, *counted, experts_per_rank)
        self._x_MD: Tensor | None = None

    def arrange(self) -> None:
        # As long as there can be rows: how many there are is not known yet.
        self._x_MD = take_rows(self.rows.x_RD.detach(), self._order.permutation)

    def leave(self, plan: DispatchPlan) -> Rows:
        num_sent = sum(plan.rows_sent)
        order = self._order.first(num_sent)
        plan.permutation = order.permutation
        weights_MK, ids_MK = order.labels()
        x_MD, self._x_MD = self._x_MD, None
        made = [None if x_MD is None else x_MD[:num_sent], weights_MK]
        x_MD, weights_MK = _Leave.apply(self.rows.x_RD, self.rows.weights_RK, made, *order.permutation)
        return Rows(x_MD, weights_MK, ids_MK)


class _Leave(torch.autograd.Function):
    """Rows and weights in sending order, as far as they were not ``made`` before; keeps the indices alone."""

    @staticmethod
    def forward(ctx, x_TD, weights_TK, made, *permutation):
        ctx.save_for_backward(*permutation)
        ctx.set_materialize_grads(False)
        x_MD, weights_MK = made
        made.clear()
        return take_rows(x_TD, RowPermutation(*permutation)) if x_MD is None else x_MD, weights_MK

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        permutation = RowPermutation(*ctx.saved_tensors)
        dx, dweights = (None if each is None else sum_rows(each, permutation) for each in gradients)
        return dx, dweights, None, None, None, None
