"""Sends every token to every EP rank, and sums the ranks' outputs on the way back.

Nothing is permuted, and the collectives are regular. But a row is also sent to ranks that hold none of its
experts, so this is efficient only if top-k is large compared with the number of EP ranks.
"""

from __future__ import annotations

from torch import Tensor

from fsdmoe.experts.dispatch.base import CountingDispatcher, DispatchPlan, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective, Gather, ReduceScatter


class AllGatherDispatcher(CountingDispatcher):
    """All-gather-v over EP, keep this rank's experts; reduce-scatter-v back."""

    name = "allgather"

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        transfer = self._outward(Gather(self.links.ep, "dispatch", plan.rows_received))
        return AsyncCollective.start(transfer, *rows)

    def gather(self, plan: DispatchPlan, started: AsyncCollective | Rows) -> Rows:
        rows = super().gather(plan, started)
        return rows._replace(ids_RK=self._as_local(rows.ids_RK))

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        transfer = self._homeward(ReduceScatter(self.links.ep, "combine", plan.rows_received))
        return AsyncCollective.start(transfer, y_RD)
