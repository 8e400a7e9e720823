"""A token to each EP rank that holds at least one of its experts, once, with uneven splits.

A row carries all K ids and weights of its token; the ids of other ranks' experts read -1 there. So a token
whose K experts live on fewer than K ranks costs fewer rows than choices, on the way out and on the way back,
where the rank's experts have already been summed::

    token t, K = 4, owners of its experts  [2, 0, 2, 3]   ->   rows (t, rank 0), (t, rank 2), (t, rank 3)

Rows are sent in order of rank, then of token. Splits are learnt from one small all-gather of counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdmoe.experts.dispatch.base import CountingDispatcher, DispatchPlan, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective, Exchange
from fsdmoe.kernels.permute import RowPermutation, group_assignments, permute, unpermute


class AllToAllDispatcher(CountingDispatcher):
    """All-to-all-v over EP, and back."""

    name = "all_to_all"

    def _sent_rows(
        self, ids_TK: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Sequence[RowPermutation | None]]:
        num_ranks = self.links.ep.size
        owners_TK = torch.where(ids_TK < 0, -1, ids_TK // self.num_local_experts)
        chunks = _distinct(owners_TK, num_ranks).split(list(sizes))
        permutations = [group_assignments(chunk, num_ranks) for chunk in chunks]
        ends_NP = torch.stack([permutation.ends_G for permutation in permutations])
        return ends_NP.diff(dim=1, prepend=ends_NP.new_zeros(len(sizes), 1)), permutations

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        transfer = Exchange(self.links.ep, "dispatch", plan.rows_sent, plan.rows_received)
        return AsyncCollective.start(self._outward(transfer), *rows)

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        transfer = Exchange(self.links.ep, "combine", plan.rows_received, plan.rows_sent)
        return AsyncCollective.start(self._homeward(transfer), y_RD)

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        assert plan.permutation is not None
        return unpermute(super().restore(plan, started), plan.permutation)

    def _arranged(self, plan: DispatchPlan, rows: Rows) -> Rows:
        """One row a (token, rank) pair; ids as the receiving rank counts its experts."""
        permutation = plan.permutation
        assert permutation is not None
        permutation = permutation._replace(sources_M=permutation.sources_M[: sum(plan.rows_sent)])
        plan.permutation = permutation
        token_M = permutation.sources_M // max(permutation.slots_RK.shape[1], 1)
        first_M1 = (permutation.groups_M() * self.num_local_experts).unsqueeze(1)
        ids_MK = rows.ids_RK.index_select(0, token_M) - first_M1
        elsewhere_MK = (ids_MK < 0) | (ids_MK >= self.num_local_experts)
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
