"""``flex`` with hot experts cloned: nothing of a plan of clones is read by the host.

As with ``all_to_all`` (:mod:`fsdmoe.experts.dispatch.cloning`), ids become *placed* ids once all ranks know
how many rows there are for each expert, and to the exchange of rows a rank simply has L + S experts. Weights
and gradients of clones have a fixed place, S slots on every rank: which of them are taken is told by the plan
on the device, and nothing is moved for those that are free::

    loads       rows for each expert, to all ranks; the plan, and placed ids     one barrier
    rows        as without clones                                                (flex.py)
    clones      owners write weights into slots of others                        one barrier
                ── experts' compute, L + S of them ──
    backward    gradients into own slots; owners read and add them               one barrier

Clones even out the (row, expert) pairs of ranks, not their rows: experts that routers choose together may
come to several ranks, and a token is more rows then. So buffers hold as many rows as pairs, or those of all
tokens if these are fewer. What does not fit takes ``all_to_all`` without clones, whose buffers have no fixed
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.dispatch.base import UNPACKED, DispatchPlan, Links, Packing, Rows
from fsdmoe.experts.dispatch.cloning import ClonePolicy, CloningPlan
from fsdmoe.experts.dispatch.flex import FlexDispatcher
from fsdmoe.experts.dispatch.flex_state import FlexPolicy, stays_in_domain
from fsdmoe.experts.dispatch.flex_transport import FlexPlan, Transport
from fsdmoe.experts.dispatch.transfer import Pending
from fsdmoe.experts.divide import clones_apart
from fsdmoe.kernels.clone_plan import ClonePlan, place_choices, plan_clones
from fsdmoe.kernels.exchange_plan import Bounds
from fsdmoe.kernels.permute import group_assignments


@dataclass(frozen=True)
class ClonesInSlots:
    """See :class:`~fsdmoe.experts.dispatch.clone_exchange.CloneExchange`. The host does not know which slots
    are taken."""

    transport: Transport
    plan: ClonePlan
    are_away = True

    @property
    def num_here(self) -> int:
        return self.plan.experts_PS.shape[1]

    def send(self, weights: Sequence[Tensor]) -> list[Pending]:
        return self.transport.send_clones(self.plan, weights)

    def send_home(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return gradients  # read by those who add them

    def add_home(self, homebound: Sequence[Tensor], totals: Sequence[Tensor | None]) -> None:
        self.transport.add_clones(self.plan, homebound, totals)


@dataclass(kw_only=True)
class FlexCloningPlan(CloningPlan, FlexPlan):
    """Of rows with placed ids."""


class FlexCloningDispatcher(FlexDispatcher):
    """See the module's text."""

    def __init__(
        self,
        links: Links,
        num_experts: int,
        packing: Packing = UNPACKED,
        *,
        top_k: int = 1,
        policy: FlexPolicy | None = None,
        clones: ClonePolicy,
    ) -> None:
        super().__init__(links, num_experts, packing, top_k=top_k, policy=policy)
        self.clones = clones
        self.num_local_experts += clones.slots
        if not stays_in_domain(links, self.state.policy):
            raise clones_apart(links.ep.size)

    def describe(self) -> str:
        return f"{super().describe()}; {self.clones.slots} slots a rank for clones of hot experts"

    def prepare_chunks(self, rows: Rows, chunks: int) -> Iterator[tuple[DispatchPlan, Rows]]:
        transport = self._connected(rows.ids_RK)
        if transport is None:
            yield from self._exact.prepare_chunks(rows, chunks)
            return
        if not transport.takes_clones:
            raise ConfigError(
                'experts.clones: with experts.dispatcher = "flex", expected ranks that reach each other\'s '
                f'memory, got exchanges that are {transport.name}; set experts.dispatcher = "all_to_all"'
            )
        placed_TK, clones = self._placed(transport, rows.ids_RK)
        for plan, chunk in self._planned_chunks(transport, rows, placed_TK, chunks):
            if isinstance(plan, FlexPlan):
                plan = FlexCloningPlan(**vars(plan), clones=clones)
            yield plan, chunk

    def _bounds(self, transport: Transport, tokens: int) -> Bounds:
        bounds = super()._bounds(transport, tokens)
        most_rows = min(tokens * transport.who.num_sources, bounds.pairs)
        return bounds._replace(rows=max(bounds.rows, most_rows))

    def _placed(self, transport: Transport, ids_TK: Tensor) -> tuple[Tensor, ClonesInSlots]:
        permutation = group_assignments(ids_TK, self.num_experts)
        counts_PE = transport.gather_loads(permutation.ends_G)
        plan = plan_clones(counts_PE, self.clones.slots, self.clones.least_rows)
        placed_TK = place_choices(ids_TK, permutation, counts_PE, plan, self.links.ep.rank)
        return placed_TK, ClonesInSlots(transport, plan)
