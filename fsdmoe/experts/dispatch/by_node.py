"""Sends each token once to every node that holds at least one of its experts; the node hands it on.

Two exchanges of ``all_to_all``, one inside the other. Each EP rank has a counterpart on every other node, the
rank with the same place there. Rows for a node go to the counterpart, over the network, and from there to all
ranks of the node that need them, over NVLink. Outputs take the same way back; a node sums them before they
leave it::

    rank 1 of node 0          rank 1 of node 2          ranks 0 and 3 of node 2
      token t ────network────► token t ──────NVLink─────► experts
      sum over nodes ◄──────── sum over ranks ◄────────── outputs

On a GPU the second exchange of a way is started on a stream of its own, as soon as the first one is done. So
both are under way between the phases of the dispatcher, in backward too: autograd runs a node on the stream
that it was made on. Sizes of both exchanges follow from one table of counts, and the host waits once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdmoe.experts.dispatch.all_to_all import AllToAllDispatcher, Sorted
from fsdmoe.experts.dispatch.base import UNPACKED, Departure, DispatchPlan, Links, Packing, Rows
from fsdmoe.experts.dispatch.transfer import AsyncCollective
from fsdmoe.kernels.send_order import index_rows


@dataclass
class NodePlan(DispatchPlan):
    """The exchange inside of this rank's node, and the one before it."""

    between: DispatchPlan | None = None


class NodeDispatcher(AllToAllDispatcher):
    """See the module's drawing."""

    name = "by_node"

    def __init__(self, links: Links, num_experts: int, packing: Packing = UNPACKED) -> None:
        super().__init__(links, num_experts, packing)
        between, inside = links.by_node()
        self._between = AllToAllDispatcher(replace(links, ep=between), num_experts, packing)
        self._inside = _Inside(replace(links, ep=inside), num_experts // between.size, packing)
        self._stream: torch.cuda.Stream | None = None

    def describe(self) -> str:
        """How rows will move, for the start-up report."""
        nodes = self._between.links.ep.size
        ranks = self._inside.links.ep.size
        return f"a row goes to each of {nodes} nodes once, which hand it on to their {ranks} ranks"

    def _counted(self, ids_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's index in the range for a node; rows to each node, and the counts by rank."""
        index_TN, counts = self._between._counted(ids_RK)
        _, _, counts_C = index_rows(ids_RK, self.links.ep.size, self.num_local_experts)
        return index_TN, torch.cat((counts[: index_TN.shape[1]], counts_C))

    def _departure(self, rows: Rows, counted: tuple[Tensor, Tensor]) -> Departure:
        return _ByNode(rows, counted, self._between.num_local_experts)

    def _plan_of(self, table: list[list[list[int]]]) -> NodePlan:
        between = self._between.links.ep
        inside = self._inside.links.ep
        by_rank = [[counts[between.size :] for counts in members] for members in table]
        flat = super()._plan_of(by_rank)
        # Of the senders that share this rank's part of ETP: counts by node, then by rank.
        to_nodes = [members[self.links.etp.rank][: between.size] for members in table]
        to_ranks = [members[self.links.etp.rank] for members in by_rank]
        counterparts = slice(inside.rank, None, inside.size)
        first = between.rank * inside.size
        return NodePlan(
            rows_sent=[
                sum(counts[first + place] for counts in to_ranks[counterparts])
                for place in range(inside.size)
            ],
            rows_received=[
                sum(counts[self.links.ep.rank] for counts in to_ranks[place :: inside.size])
                for place in range(inside.size)
            ],
            rows_gathered=flat.rows_gathered,
            max_rows=flat.max_rows,
            num_ids=flat.num_ids,
            between=replace(
                flat,
                rows_sent=to_nodes[self.links.ep.rank],
                rows_received=[counts[between.rank] for counts in to_nodes[counterparts]],
            ),
        )

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        assert isinstance(plan, NodePlan)
        assert plan.between is not None
        started = self._between.dispatch(plan.between, rows)
        del rows
        with self._aside(started.handle):
            landed = self._between._land(started)
            return self._inside.dispatch(plan, self._inside.in_order(plan, landed))

    def combine(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective:
        assert isinstance(plan, NodePlan)
        assert plan.between is not None
        started = self._inside.combine(plan, y_RD)
        with self._aside(started.handle):
            return self._between.combine(plan.between, self._inside.restore(plan, started))

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        assert isinstance(plan, NodePlan)
        assert plan.between is not None
        return self._between.restore(plan.between, started)

    def _aside(self, like: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The stream on which a second exchange waits for the first."""
        if not like.is_cuda:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)
        return torch.cuda.stream(self._stream)


class _Inside(AllToAllDispatcher):
    """Over the ranks of a node, whose experts are all that there are."""

    phases = ("hand_on", "hand_back")

    def in_order(self, plan: DispatchPlan, rows: Rows) -> Rows:
        """What has come to this rank, as it is handed on."""
        return self._departure(rows, self._counted(rows.ids_RK)).leave(plan)


class _ByNode(Sorted):
    """One row a (token, node) pair; ids as the node counts its experts."""

    def leave(self, plan: DispatchPlan) -> Rows:
        assert isinstance(plan, NodePlan)
        assert plan.between is not None
        return super().leave(plan.between)
