"""A token to each EP rank that holds at least one of its experts, once, with uneven splits.

A row carries all K ids and weights of its token; the ids of other ranks' experts read -1 there. So a token
whose K experts live on fewer than K ranks costs fewer rows than choices, on the way out and on the way back,
where the rank's experts have already been summed::

    token t, K = 4, owners of its experts  [2, 0, 2, 3]   ->   rows (t, rank 0), (t, rank 2), (t, rank 3)

Rows are sent in order of rank, then of token. Splits are learnt from one small all-gather of counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdmoe.experts.dispatch.base import Dispatcher, DispatchPlan, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective, Exchange
from fsdmoe.kernels.permute import group_assignments, permute, unpermute


class AllToAllDispatcher(Dispatcher):
    """All-to-all-v over EP, and back."""

    name = "all_to_all"

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        num_ranks = self.links.ep.size
        owners_TK = torch.where(rows.ids_RK < 0, -1, rows.ids_RK // self.num_local_experts)
        permutation = group_assignments(_distinct(owners_TK, num_ranks), num_ranks)
        rows_P = permutation.ends_G.diff(prepend=permutation.ends_G.new_zeros(1))
        plan = self._counted(rows_P, self._pairs_by_rank(rows.ids_RK), rows.ids_RK.shape[1])
        num_sent = sum(plan.rows_sent)
        plan.permutation = permutation._replace(sources_M=permutation.sources_M[:num_sent])
        return plan, self._widened(plan, self._in_sending_order(rows, owners_TK, plan))

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        transfer = Exchange(self.links.ep, "dispatch", plan.rows_sent, plan.rows_received)
        return AsyncCollective.start(self._outward(transfer), *rows)

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        transfer = Exchange(self.links.ep, "combine", plan.rows_received, plan.rows_sent)
        return AsyncCollective.start(self._homeward(transfer), y_RD)

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        assert plan.permutation is not None
        return unpermute(super().restore(plan, started), plan.permutation)

    def _in_sending_order(self, rows: Rows, owners_TK: Tensor, plan: DispatchPlan) -> Rows:
        """One row a (token, rank) pair; ids as the receiving rank counts its experts."""
        permutation = plan.permutation
        assert permutation is not None
        token_M = permutation.sources_M // max(permutation.slots_RK.shape[1], 1)
        rank_M1 = permutation.groups_M().unsqueeze(1)
        ids_MK = rows.ids_RK.index_select(0, token_M) - rank_M1 * self.num_local_experts
        elsewhere_MK = owners_TK.index_select(0, token_M) != rank_M1
        return Rows(
            x_RD=permute(rows.x_RD, permutation),
            weights_RK=permute(rows.weights_RK, permutation),
            ids_RK=ids_MK.masked_fill(elsewhere_MK, -1).int(),
        )


def _distinct(owners_TK: Tensor, num_ranks: int) -> Tensor:
    """Each row's different owners, in at most ``num_ranks`` columns; -1 fills up."""
    ordered = owners_TK.sort(dim=1, descending=True).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(repeated, -1).sort(dim=1, descending=True).values[:, :num_ranks]
