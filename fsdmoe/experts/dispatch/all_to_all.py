"""A token to each EP rank that holds at least one of its experts, once, with uneven splits.

A row carries all K ids and weights of its token; the ids of other ranks' experts read -1 there. So a token
whose K experts live on fewer than K ranks costs fewer rows than choices, on the way out and on the way back,
where the rank's experts have already been summed::

    token t, K = 4, owners of its experts  [2, 0, 2, 3]   ->   rows (t, rank 0), (t, rank 2), (t, rank 3)

Rows are sent in order of rank, then of token. Splits are learnt from one small all-gather of counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdmoe.experts.dispatch.base import CountingDispatcher, DispatchPlan, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective, Exchange
from fsdmoe.kernels.permute import RowPermutation, group_assignments, permute, unpermute


class AllToAllDispatcher(CountingDispatcher):
    """All-to-all-v over EP, and back."""

    name = "all_to_all"

    def _sent_rows(self, ids_TK: Tensor, sizes: Sequence[int]) -> tuple[Tensor, RowPermutation | None]:
        num_ranks = self.links.ep.size
        groups_TP = _distinct(torch.where(ids_TK < 0, -1, ids_TK // self.num_local_experts), num_ranks)
        if len(sizes) > 1:
            nowhere_TP = groups_TP < 0
            for number, chunk in enumerate(groups_TP.split(list(sizes))):
                chunk += number * num_ranks
            groups_TP = groups_TP.masked_fill_(nowhere_TP, -1)
        order = group_assignments(groups_TP, len(sizes) * num_ranks)
        rows_G = order.ends_G.diff(prepend=order.ends_G.new_zeros(1))
        return rows_G.view(len(sizes), num_ranks), order

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        transfer = Exchange(self.links.ep, "dispatch", plan.rows_sent, plan.rows_received)
        return AsyncCollective.start(self._outward(transfer), *rows)

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        transfer = Exchange(self.links.ep, "combine", plan.rows_received, plan.rows_sent)
        return AsyncCollective.start(self._homeward(transfer), y_RD)

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        assert plan.permutation is not None
        return unpermute(super().restore(plan, started), plan.permutation)

    def _arranged(
        self, plans: list[DispatchPlan], rows: Rows, sizes: Sequence[int], order: RowPermutation | None
    ) -> Iterator[Rows]:
        """One row a (token, rank) pair; ids as the receiving rank counts its experts. Labels are small: those
        of all chunks are put in order at once."""
        assert order is not None
        sent = [sum(plan.rows_sent) for plan in plans]
        order = order._replace(sources_M=order.sources_M[: sum(sent)])
        token_M = order.sources_M // max(order.slots_RK.shape[1], 1)
        first_M1 = (order.groups_M() % self.links.ep.size * self.num_local_experts).unsqueeze(1)
        ids_MK = rows.ids_RK.index_select(0, token_M) - first_M1
        elsewhere_MK = (ids_MK < 0) | (ids_MK >= self.num_local_experts)
        ids = ids_MK.masked_fill(elsewhere_MK, -1).int().split(sent)
        weights = permute(rows.weights_RK, order).split(sent)
        xs = [rows.x_RD] if len(sizes) == 1 else rows.x_RD.split(list(sizes))
        for plan, x_RD, *labels, permutation in zip(
            plans, xs, weights, ids, _pieces(order, sizes, sent), strict=True
        ):
            plan.permutation = permutation
            yield Rows(permute(x_RD, permutation), *labels)


def _pieces(order: RowPermutation, sizes: Sequence[int], sent: Sequence[int]) -> Iterator[RowPermutation]:
    """The permutation of each chunk by itself: ``sizes`` rows, ``sent`` slots."""
    if len(sizes) == 1:
        yield order
        return
    num_groups, num_columns = order.ends_G.shape[0] // len(sizes), order.slots_RK.shape[1]
    row = slot = 0
    for number, (num_rows, num_slots) in enumerate(zip(sizes, sent, strict=True)):
        yield RowPermutation(
            # What has no slot stays below zero.
            slots_RK=order.slots_RK[row : row + num_rows] - slot,
            sources_M=order.sources_M[slot : slot + num_slots] - row * num_columns,
            ends_G=order.ends_G[number * num_groups : (number + 1) * num_groups] - slot,
        )
        row, slot = row + num_rows, slot + num_slots


def _distinct(owners_TK: Tensor, num_ranks: int) -> Tensor:
    """Each row's different owners, in at most ``num_ranks`` columns; -1 fills up."""
    ordered = owners_TK.sort(dim=1, descending=True).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(repeated, -1).sort(dim=1, descending=True).values[:, :num_ranks]
