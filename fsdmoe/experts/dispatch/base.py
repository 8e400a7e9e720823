"""The dispatcher's interface: six phases around the experts' compute, paired from the outside in.

::

    1 prepare    which rows go where; counts to the host      x_TD, weights_TK, ids_TK (global ids)
    2 dispatch   start the EP collective                        │  all-to-all-v or all-gather-v
    3 gather     wait for it; all-gather-v over ETP             ▼
                 ── experts' compute ──                       x_RD, weights_RK, ids_RK (own ids, -1 not mine)
    4 reduce     reduce-scatter-v over ETP                      │
    5 combine    start the EP collective back                   ▼
    6 restore    wait for it; un-permute, sum in fp32         y_TD

Between 2 and 3, and between 5 and 6, rows are being sent and the caller may compute something else. ETP
members hold slices of the same experts, so after phase 3 they hold the same rows. Backward runs the phases in
reverse order; every all-gather becomes a reduce-scatter and vice versa.

Dispatchers hold no state between calls; what one layer's call needs from phase to phase is its
:class:`DispatchPlan`. Every rank may bring any number of tokens, also none: EP groups may fold over TP
and CP ranks.

Sizes: T tokens here, K choices a token, R rows that reach this rank's experts, D width of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.dispatch.chunks import chunk_sizes
from fsdmoe.experts.dispatch.host_reader import HostReader
from fsdmoe.experts.dispatch.resend import Resend
from fsdmoe.experts.dispatch.traffic import DispatchTraffic
from fsdmoe.experts.dispatch.transfer import (
    AsyncCollective,
    Gather,
    Link,
    ReduceScatter,
    RelayedLink,
    Transfer,
)
from fsdmoe.experts.divide import ep_problems
from fsdmoe.kernels.expert_operands import Rows
from fsdmoe.kernels.permute import RowPermutation
from fsdmoe.kernels.send_order import index_rows
from fsdmoe.mesh import Axis, Meshes, NodeGroups


@dataclass
class DispatchPlan:
    """What one call hands from phase to phase."""

    rows_sent: list[int]
    """Rows to each EP rank."""
    rows_received: list[int]
    """Rows from each EP rank."""
    rows_gathered: list[int]
    """Rows that each ETP member contributes after the EP collective."""
    max_rows: int | None
    """(Row, expert) pairs that this rank's experts compute; None: as many as the ids' table can hold."""
    num_ids: int
    """Ids of a row, K: the most that any rank brought (under expert choice and padded capacity K varies)."""
    permutation: RowPermutation | None = None
    """Order of the rows sent, where it is not that of the tokens."""
    resend: Resend | None = None
    """Of rows that backward sends again."""


@dataclass(frozen=True)
class Links:
    """The expert mesh as a dispatcher needs it, with one traffic counter for all axes."""

    ep: Link
    etp: Link
    expert: Link
    """EP x ETP: the ranks that together hold every expert once, ETP innermost."""
    traffic: DispatchTraffic
    node_of: Callable[[int], int] = lambda rank: 0
    """The node of a rank, the same on all ranks."""
    node_groups: Callable[[], NodeGroups] | None = None

    @classmethod
    def of(cls, meshes: Meshes) -> Links:
        traffic = DispatchTraffic()

        def link(axis: Axis) -> Link:
            return Link(meshes.group(axis), meshes.size(axis), meshes.rank(axis), traffic)

        return cls(
            link(Axis.EP), link(Axis.ETP), link(Axis.EXPERT), traffic, meshes.node_of, meshes.node_groups
        )

    def by_node(self) -> tuple[Link, Link]:
        """To this rank's counterparts on the nodes of its EP group, and to the ranks of its own node.
        Collective.

        Raises:
            ConfigError: Nodes do not have equal shares of the group.
        """
        assert self.node_groups is not None, "expected the links of a mesh"
        between, inside = self.node_groups()
        return (
            RelayedLink(between, between.size(), between.rank(), self.traffic),
            RelayedLink(inside, inside.size(), inside.rank(), self.traffic),
        )

    @classmethod
    def alone(cls) -> Links:
        """One rank that holds every expert; needs no process group."""
        traffic = DispatchTraffic()
        link = Link(None, 1, 0, traffic)
        return cls(link, link, link, traffic)


class Packing(NamedTuple):
    """What is sent in eight bits (:mod:`fsdmoe.kernels.packed_rows`). The other two legs carry sums, and stay
    as they are."""

    rows: bool = False
    """Rows on their way to experts."""
    grads: bool = False
    """The gradients of their outputs."""


UNPACKED = Packing()


class Dispatcher(ABC):
    """See the module's drawing. ETP's phases are the same for all; EP's are the subclass's."""

    name: ClassVar[str]
    takes_chunks: ClassVar[bool] = False
    """Several calls may be under way at once, between any of their phases."""
    takes_sub_batches: ClassVar[bool] = True
    """So may calls of two layers."""

    def __init__(self, links: Links, num_experts: int, packing: Packing = UNPACKED) -> None:
        self.links = links
        self.num_experts = num_experts
        self.packing = packing
        if num_experts % links.ep.size:
            raise ConfigError(*ep_problems(num_experts, links.ep.size))
        self.num_local_experts = num_experts // links.ep.size

    @property
    def traffic(self) -> DispatchTraffic:
        return self.links.traffic

    @property
    def crosses_ranks(self) -> bool:
        """Rows are sent between ranks."""
        return self.links.expert.size > 1

    @abstractmethod
    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        """Phase 1: the plan, and the rows in the order in which they are sent."""

    def prepare_chunks(self, rows: Rows, chunks: int) -> Iterator[tuple[DispatchPlan, Rows]]:
        """Phase 1 of each chunk of ``rows`` in turn. A chunk is put in order only when it is asked for: the
        order in which autograd nodes are made is the schedule of backward."""
        for chunk in rows.split(chunk_sizes(rows.ids_RK.shape[0], chunks)):
            yield self.prepare(chunk)

    @abstractmethod
    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective | Rows:
        """Phase 2: start the EP collective (nothing to start: the rows themselves)."""

    def gather(self, plan: DispatchPlan, started: AsyncCollective | Rows) -> Rows:
        """Phase 3: wait, then give every ETP member all rows of the group."""
        rows = self._land(started)
        if self.links.etp.size == 1:
            return rows
        return Rows(*self._start_gather(plan, rows).wait())

    def reduce(self, plan: DispatchPlan, y_RD: Tensor) -> Tensor:
        """Phase 4: sum the ETP members' partial outputs, each member keeping the rows it brought."""
        if self.links.etp.size == 1:
            return y_RD
        return self._start_reduce(plan, y_RD).wait()[0]

    @abstractmethod
    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective | Tensor:
        """Phase 5: start the EP collective back."""

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        """Phase 6: wait; one row a token again."""
        return started.wait()[0] if isinstance(started, AsyncCollective) else started

    def _start_gather(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        """Every ETP member's rows to all of them."""
        transfer = self._outward(Gather(self.links.etp, "gather", plan.rows_gathered))
        return AsyncCollective.start(transfer, *rows)

    def _start_reduce(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        transfer = self._homeward(ReduceScatter(self.links.etp, "reduce", plan.rows_gathered))
        return AsyncCollective.start(transfer, y_RD)

    def _outward(self, transfer: Transfer) -> Transfer:
        """The leg to the experts; gradients come back over it as sums."""
        transfer.packs = self.packing.rows
        return transfer

    def _homeward(self, transfer: Transfer) -> Transfer:
        """The leg back, over which gradients reach the experts."""
        transfer.packs_grad = self.packing.grads
        return transfer

    def _land(self, started: AsyncCollective | Rows) -> Rows:
        return Rows(*started.wait()) if isinstance(started, AsyncCollective) else started

    def _widened(self, plan: DispatchPlan, rows: Rows) -> Rows:
        """Rows with as many ids as the plan's; those added are -1."""
        missing = plan.num_ids - rows.ids_RK.shape[1]
        if missing <= 0:
            return rows
        return Rows(
            rows.x_RD, F.pad(rows.weights_RK, (0, missing)), F.pad(rows.ids_RK, (0, missing), value=-1)
        )

    def _as_local(self, ids: Tensor) -> Tensor:
        """Global ids as this EP rank's own, int32; -1 for experts that live elsewhere."""
        local = ids - self.links.ep.rank * self.num_local_experts
        return local.masked_fill((local < 0) | (local >= self.num_local_experts), -1).int()


class CountingDispatcher(Dispatcher):
    """Learns how many rows go where from one small all-gather of counts, however many chunks there are."""

    takes_chunks = True

    def __init__(self, links: Links, num_experts: int, packing: Packing = UNPACKED) -> None:
        super().__init__(links, num_experts, packing)
        self._reader = HostReader()

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        counted = self._counted(rows.ids_RK)
        plans = self._start_counting([counted[1]])
        departure = self._departure(rows, counted)
        if rows.x_RD.is_cuda:
            departure.arrange()  # while the host waits, or the device would wait for the host
        (plan,) = plans()
        return plan, self._widened(plan, departure.leave(plan))

    def prepare_chunks(self, rows: Rows, chunks: int) -> Iterator[tuple[DispatchPlan, Rows]]:
        pieces = rows.split(chunk_sizes(rows.ids_RK.shape[0], chunks))
        counted = [self._counted(chunk.ids_RK) for chunk in pieces]
        plans = self._start_counting([counts_C for _, counts_C in counted])
        departures = [self._departure(*each) for each in zip(pieces, counted, strict=True)]
        if rows.x_RD.is_cuda:
            for departure in departures[:2]:  # those that leave at once; as in prepare
                departure.arrange()
        for plan, departure in zip(plans(), departures, strict=True):
            yield plan, self._widened(plan, departure.leave(plan))

    def _counted(self, ids_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's index in the range for an EP rank, and this rank's counts."""
        index_TP, _, counts_C = index_rows(ids_RK, self.links.ep.size, self.num_local_experts)
        return index_TP, counts_C

    def _departure(self, rows: Rows, counted: tuple[Tensor, Tensor]) -> Departure:
        """One chunk before it is sent, from its rows and what is known of their places."""
        return Departure(rows)

    def _start_counting(self, counts: list[Tensor]) -> Callable[[], list[DispatchPlan]]:
        """The chunks' plans, from what each has for whom (:func:`fsdmoe.kernels.send_order.index_rows`).

        One small all-gather and one read by the host: the only place where a dispatcher waits for the device.
        """
        ep, etp = self.links.ep, self.links.etp
        mine = counts[0] if len(counts) == 1 else torch.cat(counts)
        gathered = self.links.expert.gather(mine, [mine.numel()] * self.links.expert.size, "counts")
        read = self._reader.start(gathered) if mine.is_cuda else gathered
        # Kept until it is read: it is the reader's stream that waits for the collective, and this one would
        # give its memory to the next kernel.
        kept = [mine]

        def plans() -> list[DispatchPlan]:
            self.links.traffic.host_syncs += 1
            # By chunk and (ep, etp) of the sender: rows to each EP rank, pairs to each, tokens, ids of one.
            tables = read().view(ep.size, etp.size, len(counts), -1).movedim(2, 0).tolist()
            kept.clear()
            return [self._plan_of(table) for table in tables]

        return plans

    def _rows_to(self, counts: list[int], ep_rank: int) -> int:
        """How many rows a sender with these counts has for an EP rank. Here: all of its tokens."""
        return counts[2 * self.links.ep.size]

    def _plan_of(self, table: list[list[list[int]]]) -> DispatchPlan:
        """``table``: the counts of each sender, by its EP and ETP rank."""
        ep = self.links.ep
        etp = self.links.etp
        plan = DispatchPlan([], [], [0] * etp.size, max_rows=0, num_ids=0)
        for source, members in enumerate(table):
            plan.rows_sent.append(self._rows_to(table[ep.rank][etp.rank], source))
            for member, counts in enumerate(members):
                rows = self._rows_to(counts, ep.rank)
                plan.rows_gathered[member] += rows
                if member == etp.rank:
                    plan.rows_received.append(rows)
                plan.max_rows += counts[ep.size + ep.rank]  # type: ignore[operator]
                plan.num_ids = max(plan.num_ids, counts[-1])
        return plan


class Departure:
    """A chunk's rows until they are sent. Here: in the order of tokens."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def arrange(self) -> None:
        """Do already what needs nobody else's counts."""

    def leave(self, plan: DispatchPlan) -> Rows:
        """The rows in sending order. A node of autograd is made here and not before: the order in which nodes
        are made is the schedule of backward."""
        return self.rows._replace(ids_RK=self.rows.ids_RK.int())
