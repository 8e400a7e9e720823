"""All-to-all-v with hot experts cloned: rows above the mean of a rank are computed by clones on others.

Before rows are counted for the exchange, ranks tell each other how many rows they have for each expert. From
that all find the same plan (:mod:`fsdmoe.kernels.clone_plan`), and ids become *placed* ids: a rank has its L
experts and S slots for clones, and to the exchange these are simply L + S experts of a rank. Which experts
travel is read by the host together with the counts that it reads anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.experts.dispatch.all_to_all import AllToAllDispatcher
from fsdmoe.experts.dispatch.base import UNPACKED, DispatchPlan, Links, Packing, Rows
from fsdmoe.experts.dispatch.clone_exchange import CloneExchange, Clones, ClonesByLink
from fsdmoe.experts.dispatch.clone_weights import CloneWeights
from fsdmoe.kernels.clone_plan import place_choices, plan_clones
from fsdmoe.kernels.permute import group_assignments


class ClonePolicy(NamedTuple):
    """See the keys of ``experts`` in :mod:`fsdmoe.experts.config`."""

    slots: int
    least_rows: int = 0
    keep: bool = True


NO_CLONES = ClonePolicy(0)


@dataclass(kw_only=True)
class CloningPlan(DispatchPlan):
    """With what travels in addition to rows."""

    clones: CloneExchange | None = None
    """None where nobody has any."""
    weights: CloneWeights | None = None
    """Once they are under way."""


class CloningDispatcher(AllToAllDispatcher):
    """See the module's text. Its ids are placed ids: those of clones follow those of a rank's own experts."""

    def __init__(
        self, links: Links, num_experts: int, packing: Packing = UNPACKED, *, policy: ClonePolicy
    ) -> None:
        super().__init__(links, num_experts, packing)
        self.clones = policy
        self.num_local_experts += policy.slots

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        rows, clones = self._placed(rows)
        plan, rows = super().prepare(rows)
        return self._with_clones(plan, clones), rows

    def prepare_chunks(self, rows: Rows, chunks: int) -> Iterator[tuple[DispatchPlan, Rows]]:
        rows, clones = self._placed(rows)
        for plan, chunk in super().prepare_chunks(rows, chunks):
            yield self._with_clones(plan, clones), chunk

    def _with_clones(self, plan: DispatchPlan, clones: Callable[[], CloneExchange | None]) -> DispatchPlan:
        if isinstance(plan, CloningPlan):
            plan.clones = clones()
        return plan

    def _placed(self, rows: Rows) -> tuple[Rows, Callable[[], CloneExchange | None]]:
        """Rows with placed ids, and what to call once the host has read the counts of rows."""
        ep = self.links.ep
        permutation = group_assignments(rows.ids_RK, self.num_experts)
        counts_E = torch.diff(permutation.ends_G, prepend=permutation.ends_G.new_zeros(1))
        gathered = ep.gather(counts_E, [self.num_experts] * ep.size, "counts")
        counts_PE = gathered().view(ep.size, self.num_experts)
        plan = plan_clones(counts_PE, self.clones.slots, self.clones.least_rows)
        placed_RK = place_choices(rows.ids_RK, permutation, counts_PE, plan, ep.rank)
        read = self._start_reading(plan.experts_PS)

        @functools.cache
        def clones() -> CloneExchange | None:
            experts_PS = read()
            if bool((experts_PS == self.num_experts).all()):
                return None
            return ClonesByLink(ep, Clones.of(experts_PS.tolist(), ep.rank, self.num_experts))

        return rows._replace(ids_RK=placed_RK), clones

    def _start_reading(self, numbers: Tensor) -> Callable[[], Tensor]:
        if not numbers.is_cuda:
            return lambda: numbers
        written = torch.cuda.current_stream().record_event()

        def pending() -> Tensor:
            torch.cuda.current_stream().wait_event(written)  # of the reader
            return numbers

        return self._reader.start(pending)

    def _plan_of(self, table: list[list[list[int]]]) -> DispatchPlan:
        return CloningPlan(**vars(super()._plan_of(table)))
