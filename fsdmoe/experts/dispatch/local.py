"""Every rank holds every expert (EP 1): tokens stay, unless ETP slices the experts."""

from __future__ import annotations

from torch import Tensor

from fsdmoe.errors import ConfigError
from fsdmoe.experts.dispatch.base import UNPACKED, Dispatcher, DispatchPlan, Links, Packing, Rows


def check_local(ep: int) -> None:
    """Refuse experts that stand on several ranks."""
    if ep > 1:
        raise ConfigError(
            f"experts.dispatcher: 'local' expected mesh.ep = 1, got {ep}; "
            "write 'auto', 'allgather' or 'all_to_all'"
        )


class LocalDispatcher(Dispatcher):
    """No EP collective, and without ETP no communication and no wait at all."""

    name = "local"

    def __init__(self, links: Links, num_experts: int, packing: Packing = UNPACKED) -> None:
        super().__init__(links, num_experts, packing)
        check_local(links.ep.size)

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        num_tokens, num_ids = rows.ids_RK.shape
        if self.links.etp.size == 1:
            return DispatchPlan(
                [num_tokens], [num_tokens], [num_tokens], max_rows=None, num_ids=num_ids
            ), rows
        pairs_P = self._pairs_by_rank(rows.ids_RK)
        plan = self._counted(pairs_P.new_full((1,), num_tokens), pairs_P, num_ids)
        return plan, self._widened(plan, rows._replace(ids_RK=rows.ids_RK.int()))

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> Rows:
        return rows

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> Tensor:
        return y_RD
