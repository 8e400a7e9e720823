"""How rows of the ``flex`` dispatcher get from rank to rank; three transports with one interface.

==============  =======================================================  ==============  =====================
transport       how                                                      receive buffer  the host reads counts
==============  =======================================================  ==============  =====================
``written``     kernels write into the other ranks' memory and signal    packed          no
                (:mod:`fsdmoe.experts.dispatch.flex_peer`)
``padded``      all-to-all of equal pieces, over any network             by source       no
``reference``   all-to-all-v, in plain torch on a CPU: the definition    packed          yes
==============  =======================================================  ==============  =====================

``deliver`` copies every row to all ranks that need it; ``collect`` is its transpose and sums, in fp32, what
they send back. Forward and backward of both legs are made of these two. Where the plan's flag is raised,
nothing is delivered and what is collected is NaN: who does not look at the flag must not go on unaware.

Sizes: T tokens here, R rows of the receive buffer, W width of a part (rows; their weights and ids).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.compat import all_gather
from fsdmoe.experts.dispatch.base import DispatchPlan, Links
from fsdmoe.experts.dispatch.clone_exchange import Clones, ClonesByLink
from fsdmoe.experts.dispatch.transfer import Pending, Transfer
from fsdmoe.kernels.clone_plan import ClonePlan
from fsdmoe.kernels.exchange_plan import Bounds, Notes, Places, Who, places_of, take_notes
from fsdmoe.kernels.permute import RowPermutation, sum_rows, take_rows
from fsdmoe.kernels.send_order import index_rows

Made = TypeVar("Made")


@dataclass(kw_only=True)
class FlexPlan(DispatchPlan):
    """One call's rows and their places; everything but the bounds is on the device."""

    bounds: Bounds
    index_TP: Tensor
    routes_TC2: Tensor
    table_SC: Tensor
    places: Places
    experts_per_rank: int
    rows_sent: list[int] = field(default_factory=list)
    rows_received: list[int] = field(default_factory=list)
    rows_gathered: list[int] = field(default_factory=list)


_NO_CLONES = "clones over padded exchanges, which the dispatcher refuses"


class Transport(ABC):
    """Rows of one EP x ETP group. All layers of a model share one."""

    name: ClassVar[str]
    by_source: ClassVar[bool] = False
    """Every source has its own range of the receive buffer."""
    takes_clones: ClassVar[bool] = True

    def __init__(self, links: Links, device: torch.device) -> None:
        self.links = links
        self.notes = Notes.on(device)
        ep, everyone = links.ep, links.expert
        self.who = Who(everyone.rank, ep.rank, ep.size, everyone.size)

    def settle(self) -> None:  # noqa: B027 - torch orders streams of its collectives itself
        """The current stream waits for all that was started; the host does not."""

    def check(self) -> None:  # noqa: B027 - and they have time limits
        """Raise if another rank did not answer in time. The host waits."""

    def plan(self, ids_TK: Tensor, num_experts: int, bounds: Bounds, *, raises: bool) -> FlexPlan:
        """Which rows go where; ``raises``: a flag is kept until somebody reads it."""
        per_rank = num_experts // self.who.num_ranks
        index_TP, routes_TC2, counts_C = index_rows(ids_TK, self.who.num_ranks, per_rank)
        table_SC, places = self.gather_counts(counts_C, bounds, raises)
        return FlexPlan(
            max_rows=bounds.pairs,
            num_ids=bounds.num_ids,
            bounds=bounds,
            index_TP=index_TP,
            routes_TC2=routes_TC2,
            table_SC=table_SC,
            places=places,
            experts_per_rank=per_rank,
        )

    def gather_counts(self, counts_C: Tensor, bounds: Bounds, raises: bool) -> tuple[Tensor, Places]:
        """Everybody's counts, and the places that follow."""
        table_SC = counts_C.new_empty(self.who.num_sources, self.who.num_counts)
        all_gather(table_SC.view(-1), counts_C, self.links.expert.group)
        self.links.traffic.add("counts", counts_C.numel() * 4 * (self.who.num_sources - 1))
        places = places_of(table_SC, bounds, self.who)
        take_notes(self.notes, table_SC, places, bounds, self.who, raises)
        return table_SC, places

    @abstractmethod
    def deliver(self, plan: FlexPlan, parts: Sequence[Tensor], phase: str) -> list[Pending]:
        """``[T, W]`` to ``[R, W]`` of each part; zeros where no row landed. A second part is weights next to
        global ids, int32: it arrives with this rank's own ids, -1 for those of others and for free rows."""

    @abstractmethod
    def collect(self, plan: FlexPlan, parts: Sequence[Tensor | None], phase: str) -> list[Pending | None]:
        """``[R, W]`` to ``[T, W]``: the sum of what came back for each token."""

    # Clones of experts; without etp, so that sources are EP ranks

    def gather_loads(self, ends_E: Tensor) -> Tensor:
        """``[P, E]``: everybody's rows for each expert, from where each expert's end in the order of
        experts."""
        raise AssertionError(_NO_CLONES)

    def send_clones(self, clones: ClonePlan, weights: Sequence[Tensor]) -> list[Pending]:
        """Of each of ``weights``, ``[L, ...]``, what belongs in this rank's slots, ``[S, ...]``. A slot that
        is free holds anything; zeros in biases, which are multiplied by zeros where no row takes them."""
        raise AssertionError(_NO_CLONES)

    def add_clones(
        self, clones: ClonePlan, gradients: Sequence[Tensor], totals: Sequence[Tensor | None]
    ) -> None:
        """Add ``gradients``, ``[S, ...]`` in fp32 of what :meth:`send_clones` brought, to the ``totals`` of
        those who sent it. The current stream waits."""
        raise AssertionError(_NO_CLONES)

    def local_labels(self, plan: FlexPlan, labels_RL: Tensor, landed_R: Tensor) -> Tensor:
        """Weights as they are, ids as this rank counts its experts."""
        weights, ids = labels_RL.chunk(2, dim=1)
        ids = ids - self.who.ep_rank * plan.experts_per_rank
        is_mine = (ids >= 0) & (ids < plan.experts_per_rank) & landed_R.unsqueeze(1)
        return torch.cat((weights, torch.where(is_mine, ids, -1)), dim=1)


class Deliver(Transfer):
    """To the experts; its backward brings gradients of rows and weights home."""

    def __init__(self, transport: Transport, plan: FlexPlan) -> None:
        super().__init__(transport.links.expert, "dispatch")
        self.transport, self.plan = transport, plan

    def forward_all(self, parts: Iterable[Tensor]) -> list[Pending]:
        return self.transport.deliver(self.plan, list(parts), self.phase)

    def backward_all(self, parts: Sequence[Tensor | None]) -> list[Pending | None]:
        return self.transport.collect(self.plan, parts, f"{self.phase}.backward")


class Collect(Transfer):
    """Home from the experts; its backward takes gradients of outputs there."""

    def __init__(self, transport: Transport, plan: FlexPlan) -> None:
        super().__init__(transport.links.expert, "combine")
        self.transport, self.plan = transport, plan

    def forward(self, rows: Tensor) -> Pending:
        found = self.transport.collect(self.plan, [rows], self.phase)[0]
        assert found is not None
        return found

    def backward(self, rows: Tensor) -> Pending:
        return self.transport.deliver(self.plan, [rows], f"{self.phase}.backward")[0]


class _ByCollective(Transport):
    """What ``padded`` and ``reference`` share: rows are put in sending order first, and summed afterwards.
    Their plans differ in where the rows of each rank begin, their exchanges in how many rows they send."""

    def plan(self, ids_TK: Tensor, num_experts: int, bounds: Bounds, *, raises: bool) -> FlexPlan:
        plan = super().plan(ids_TK, num_experts, bounds, raises=raises)
        starts_S, num_slots = self._starts(plan)
        index_TS = plan.index_TP.repeat_interleave(self.who.num_members, 1)
        sent_TS = (index_TS >= 0) & (plan.places.flag == 0)
        slots_TS = torch.where(sent_TS, index_TS + starts_S, num_slots)
        sources = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=ids_TK.device)
        numbers = torch.arange(slots_TS.numel(), dtype=torch.int32, device=ids_TK.device)
        sources.scatter_(0, slots_TS.flatten().long(), numbers)
        slots_TS = slots_TS.masked_fill(~sent_TS, -1).int()
        plan.permutation = RowPermutation(slots_TS, sources[:num_slots], slots_TS.new_empty(0))
        return plan

    def deliver(self, plan: FlexPlan, parts: Sequence[Tensor], phase: str) -> list[Pending]:
        assert plan.permutation is not None
        permutation = plan.permutation
        sent = [
            take_rows(part, permutation)
            if len(part)
            else part.new_zeros(permutation.num_slots, part.shape[1])
            for part in parts
        ]
        started = [self._exchange(plan, part, phase) for part in sent]
        landed_R = self._landed(plan)

        def rows() -> Tensor:
            return torch.where(landed_R.unsqueeze(1), started[0](), 0)

        def labels() -> Tensor:
            return self.local_labels(plan, started[1](), landed_R)

        return [rows, labels][: len(parts)]

    def collect(self, plan: FlexPlan, parts: Sequence[Tensor | None], phase: str) -> list[Pending | None]:
        permutation = plan.permutation
        assert permutation is not None

        def summed(started: Pending) -> Pending:
            def wait() -> Tensor:
                total = sum_rows(started(), permutation)
                if total.dtype == torch.uint8:
                    return total
                return total.masked_fill(plan.places.flag > 0, torch.nan)

            return wait

        return [None if part is None else summed(self._exchange_back(plan, part, phase)) for part in parts]

    @abstractmethod
    def _starts(self, plan: FlexPlan) -> tuple[Tensor | int, int]:
        """Where the rows of each rank begin in sending order, and how many rows there are at most."""

    @abstractmethod
    def _landed(self, plan: FlexPlan) -> Tensor:
        """Which rows of the receive buffer hold something."""

    @abstractmethod
    def _exchange(self, plan: FlexPlan, rows: Tensor, phase: str) -> Pending: ...

    @abstractmethod
    def _exchange_back(self, plan: FlexPlan, rows: Tensor, phase: str) -> Pending: ...


class PaddedTransport(_ByCollective):
    """Each rank sends as many rows to every other as its range there holds, used or not. The host
    knows the size of every message, so it never waits; more is sent than is needed."""

    name = "padded"
    by_source = True
    takes_clones = False

    def _starts(self, plan: FlexPlan) -> tuple[Tensor | int, int]:
        piece, num_sources = plan.bounds.rows_per_source, self.who.num_sources
        return torch.arange(num_sources, device=plan.index_TP.device) * piece, num_sources * piece

    def _landed(self, plan: FlexPlan) -> Tensor:
        counts_S = torch.where(plan.places.flag > 0, 0, plan.table_SC[:, self.who.ep_rank])
        index = torch.arange(plan.bounds.rows_per_source, device=counts_S.device)
        return (index < counts_S.unsqueeze(1)).flatten()

    def _exchange(self, plan: FlexPlan, rows: Tensor, phase: str) -> Pending:
        pieces = [plan.bounds.rows_per_source] * self.who.num_sources
        return self.links.expert.exchange(rows, pieces, pieces, phase)

    _exchange_back = _exchange


class ReferenceTransport(_ByCollective):
    """The plan of ``written``, with sizes that the host reads from a table in its own memory."""

    name = "reference"

    def _starts(self, plan: FlexPlan) -> tuple[Tensor | int, int]:
        rows_S = torch.tensor(self._splits(plan)[0], device=plan.index_TP.device)
        return rows_S.cumsum(0) - rows_S, int(rows_S.sum())

    def _landed(self, plan: FlexPlan) -> Tensor:
        return torch.arange(plan.bounds.rows, device=plan.index_TP.device) < plan.places.first_S[-1]

    def _splits(self, plan: FlexPlan) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each rank."""
        if int(plan.places.flag):
            return [0] * self.who.num_sources, [0] * self.who.num_sources
        sent_P = plan.table_SC[self.who.source, : self.who.num_ranks]
        sent_S = sent_P.repeat_interleave(self.who.num_members)
        return sent_S.tolist(), plan.table_SC[:, self.who.ep_rank].tolist()

    def _exchange(self, plan: FlexPlan, rows: Tensor, phase: str) -> Pending:
        sent, received = self._splits(plan)
        started = self.links.expert.exchange(rows, sent, received, phase)

        def wait() -> Tensor:
            landed = started()
            return torch.nn.functional.pad(landed, (0, 0, 0, plan.bounds.rows - len(landed)))

        return wait

    def _exchange_back(self, plan: FlexPlan, rows: Tensor, phase: str) -> Pending:
        sent, received = self._splits(plan)
        return self.links.expert.exchange(rows[: sum(received)], received, sent, phase)

    def gather_loads(self, ends_E: Tensor) -> Tensor:
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        counts_PE = counts_E.new_empty(self.who.num_ranks, len(counts_E))
        all_gather(counts_PE.view(-1), counts_E, self.links.expert.group)
        self.links.traffic.add("counts", counts_E.numel() * 4 * (self.who.num_ranks - 1))
        return counts_PE

    def send_clones(self, clones: ClonePlan, weights: Sequence[Tensor]) -> list[Pending]:
        num_slots = clones.experts_PS.shape[1]

        def in_slots(wait: Pending) -> Pending:
            def landed() -> Tensor:
                found = wait()
                free = 0.0 if found.dim() == 2 else torch.nan
                rest = found.new_full((num_slots - len(found), *found.shape[1:]), free)
                return torch.cat((found, rest))  # free slots come last

            return landed

        return [in_slots(wait) for wait in self._by_link(clones).send(weights)]

    def add_clones(
        self, clones: ClonePlan, gradients: Sequence[Tensor], totals: Sequence[Tensor | None]
    ) -> None:
        by_link = self._by_link(clones)
        num_taken = sum(by_link.clones.received)
        by_link.add_home(by_link.send_home([each[:num_taken] for each in gradients]), totals)

    def _by_link(self, clones: ClonePlan) -> ClonesByLink:
        ep = self.links.ep
        return ClonesByLink(ep, Clones.of(clones.experts_PS.tolist(), ep.rank, clones.num_experts))


def agree(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The largest of every rank's; the host waits."""
    found = torch.tensor(numbers, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.tolist()


class SetupError(RuntimeError):
    """What ranks have to set up together cannot be, on one of them at least; raised on all of them."""


def all_or_none(attempt: Callable[[], Made], group: dist.ProcessGroup | None, device: torch.device) -> Made:
    """What ``attempt`` gives, once it has succeeded on all ranks: one that fails alone would leave the others
    waiting for it in whatever they do next. Collective, and the host waits."""
    made, problem = None, None
    try:
        made = attempt()
    except (RuntimeError, ImportError) as error:
        problem = error
    if agree((int(problem is not None),), group, device)[0]:
        raise SetupError(str(problem or "it failed on another rank")) from problem
    return cast(Made, made)
