"""Writes rows directly into the memory of the ranks that need them; the host never learns how many.

As with ``all_to_all``, a token becomes one row for each rank of the EP x ETP group that holds a part of one
of its experts. But the receive buffer has a fixed size and counts stay on the device. ETP needs no separate
phases: the row is sent to every member of an EP rank, and the sender sums what all of them return::

    1 prepare    counts to all ranks, places from everybody's counts; all on the device
    2 dispatch   rows, weights and ids into the receivers' buffers
    3 gather     wait for what others send
                 ── experts' compute ──                     x_RD: R is the bound; ids are -1 in free rows
    4 reduce     -
    5 combine    outputs into the senders' buffers
    6 restore    wait; one row a token again, summed in fp32

The transport moves rows (:mod:`fsdmoe.experts.dispatch.flex_transport`). The state decides how much fits and
what happens otherwise (:mod:`fsdmoe.experts.dispatch.flex_state`): rows that do not fit take ``all_to_all``.

Sizes: T tokens here, K choices a token, R rows of the receive buffer, D width of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from fsdmoe.experts.dispatch.all_to_all import AllToAllDispatcher
from fsdmoe.experts.dispatch.base import UNPACKED, Dispatcher, DispatchPlan, Links, Packing, Rows
from fsdmoe.experts.dispatch.chunks import chunk_limits, chunk_sizes
from fsdmoe.experts.dispatch.flex_state import FlexPolicy, FlexState, stays_in_domain
from fsdmoe.experts.dispatch.flex_transport import Collect, Deliver, FlexPlan, Transport
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.dispatch.transfer import AsyncCollective
from fsdmoe.experts.dispatch.volume import ExpertLayout
from fsdmoe.kernels.exchange_plan import Bounds, even_bounds


class FlexDispatcher(Dispatcher):
    """See the module's drawing."""

    name = "flex"
    takes_chunks = True
    takes_sub_batches = False  # layers share their buffers

    def __init__(
        self,
        links: Links,
        num_experts: int,
        packing: Packing = UNPACKED,
        *,
        top_k: int = 1,
        policy: FlexPolicy | None = None,
    ) -> None:
        super().__init__(links, num_experts, packing)
        self.state = FlexState(policy or FlexPolicy())
        """This layer's own until layers are made to share one."""
        self.top_k = top_k
        self._exact: Dispatcher = AllToAllDispatcher(links, num_experts, packing)
        if not self.crosses_ranks:
            self._exact = LocalDispatcher(links, num_experts, packing)
        self._share = ExpertLayout(num_experts, min(top_k, num_experts), links.ep.size).rank_probability

    def describe(self) -> str:
        """How rows will move, for the start-up report."""
        if not self.crosses_ranks:
            return "nobody to send to"
        size = f"ep {self.links.ep.size}, etp {self.links.etp.size}"
        if not stays_in_domain(self.links, self.state.policy):
            return f"{size} spans several NVLink domains: equal pieces by all-to-all, no waits for counts"
        return f"{size} within one NVLink domain: rows are written into each other's memory"

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        return next(self.prepare_chunks(rows, 1))

    def prepare_chunks(self, rows: Rows, chunks: int) -> Iterator[tuple[DispatchPlan, Rows]]:
        if not self.crosses_ranks:
            yield self._exact.prepare(rows)
            return
        transport = self._connected(rows.ids_RK)
        if transport is None:
            yield from self._exact.prepare_chunks(rows, chunks)
        else:
            yield from self._planned_chunks(transport, rows, rows.ids_RK, chunks)

    def _connected(self, ids_TK: Tensor) -> Transport | None:
        """What moves these rows; None where they take ``all_to_all``."""
        state = self.state
        if state.is_repeating:
            self._want(ids_TK)
            return None
        if state.transport is None:
            self._want(ids_TK)
        state.grow(self)
        return state.connect(self.links, ids_TK.device)

    def _planned_chunks(
        self, transport: Transport, rows: Rows, placed_TK: Tensor, chunks: int
    ) -> Iterator[tuple[DispatchPlan, Rows]]:
        """``placed_TK``: ids as ranks count what they compute; the rows' own are for ``all_to_all``."""
        # Bounds are of the whole: which share of it a chunk may bring is known to all ranks alike.
        limits = chunk_limits(self.state.tokens, chunks)
        sizes = chunk_sizes(len(placed_TK), chunks)
        for limit, chunk, placed in zip(limits, rows.split(sizes), placed_TK.split(sizes), strict=True):
            plan = self._planned(transport, limit, placed)
            if plan is not None:
                yield plan, self._fitted(plan, chunk._replace(ids_RK=placed))
            else:
                self._want(rows.ids_RK)
                yield self._exact.prepare(chunk)

    def _planned(self, transport: Transport, limit: int, ids_TK: Tensor) -> FlexPlan | None:
        """Of at most ``limit`` tokens a rank; None if they are checked, and do not fit."""
        state, waits = self.state, self.state.waits
        bounds = self._bounds(transport, limit)
        plan = transport.plan(ids_TK, self._num_placed, bounds, raises=not waits)
        if not waits:
            return plan
        self.traffic.host_syncs += 1
        transport.settle()
        if not int(plan.places.flag):
            return plan
        transport.check()
        state.reroute()
        return None

    @property
    def _num_placed(self) -> int:
        """Ids on all ranks."""
        return self.num_local_experts * self.links.ep.size

    def _fitted(self, plan: FlexPlan, rows: Rows) -> Rows:
        """Rows with as many ids as the plan's."""
        rows = rows._replace(ids_RK=rows.ids_RK.int())
        if rows.ids_RK.shape[1] > plan.num_ids:  # the flag is raised, and ids are of no use
            return rows._replace(
                weights_RK=rows.weights_RK[:, : plan.num_ids], ids_RK=rows.ids_RK[:, : plan.num_ids]
            )
        return self._widened(plan, rows)

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective | Rows:
        if not isinstance(plan, FlexPlan):
            return self._exact.dispatch(plan, rows)
        return AsyncCollective.start(self._outward(Deliver(self._transport, plan)), *rows)

    def gather(self, plan: DispatchPlan, started: AsyncCollective | Rows) -> Rows:
        return self._land(started) if isinstance(plan, FlexPlan) else self._exact.gather(plan, started)

    def reduce(self, plan: DispatchPlan, y_RD: Tensor) -> Tensor:
        return y_RD if isinstance(plan, FlexPlan) else self._exact.reduce(plan, y_RD)

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective | Tensor:
        if not isinstance(plan, FlexPlan):
            return self._exact.combine(plan, y_RD)
        return AsyncCollective.start(self._homeward(Collect(self._transport, plan)), y_RD)

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        if not isinstance(plan, FlexPlan):
            return self._exact.restore(plan, started)
        return super().restore(plan, started)

    @property
    def _transport(self) -> Transport:
        assert self.state.transport is not None
        return self.state.transport

    def _bounds(self, transport: Transport, tokens: int) -> Bounds:
        return even_bounds(
            tokens,
            self.state.num_ids,
            factor=self.state.policy.rows,
            share=self._share,
            top_k=self.top_k,
            who=transport.who,
            by_source=transport.by_source,
        )

    def _want(self, ids_TK: Tensor) -> None:
        """Batches larger than any before fit the next time. The host waits, where it does anyway."""
        num_tokens, num_ids = ids_TK.shape
        self.state.want(self, num_tokens, num_ids, self.links, ids_TK.device)


def share_state(dispatchers: Iterable[Dispatcher]) -> FlexState | None:
    """Let all ``flex`` layers of a model use the same buffers; None where there are no such layers."""
    flex = [each for each in dispatchers if isinstance(each, FlexDispatcher)]
    for each in flex:
        each.state = flex[0].state
    return flex[0].state if flex else None
