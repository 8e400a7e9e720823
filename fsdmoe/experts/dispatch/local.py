"""Every rank holds every expert (EP 1): tokens stay, unless ETP slices the experts."""

from __future__ import annotations

from torch import Tensor

from fsdmoe.core.features import refuse_together
from fsdmoe.experts.config import EXPERTS_ELSEWHERE
from fsdmoe.experts.dispatch.base import UNPACKED, CountingDispatcher, DispatchPlan, Links, Packing, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective


class LocalDispatcher(CountingDispatcher):
    """No EP collective, and without ETP no communication and no wait at all. With ETP the collectives over it
    are started and awaited in the phases in which the others do that over EP."""

    name = "local"

    def __init__(self, links: Links, num_experts: int, packing: Packing = UNPACKED) -> None:
        super().__init__(links, num_experts, packing)
        refuse_together((EXPERTS_ELSEWHERE,), {"experts.dispatcher": self.name, "mesh.ep": links.ep.size})

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        if self.links.etp.size > 1:
            return super().prepare(rows)
        num_tokens, num_ids = rows.ids_RK.shape
        return DispatchPlan([num_tokens], [num_tokens], [num_tokens], max_rows=None, num_ids=num_ids), rows

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective | Rows:
        return self._start_gather(plan, rows) if self.links.etp.size > 1 else rows

    def gather(self, plan: DispatchPlan, started: AsyncCollective | Rows) -> Rows:
        return self._land(started)

    def reduce(self, plan: DispatchPlan, y_RD: Tensor) -> Tensor:
        return y_RD

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective | Tensor:
        return self._start_reduce(plan, y_RD) if self.links.etp.size > 1 else y_RD
