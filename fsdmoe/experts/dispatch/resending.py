"""Dispatchers whose rows are sent again in backward (:mod:`fsdmoe.experts.dispatch.resend`)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fsdmoe.experts.dispatch.all_to_all import AllToAllDispatcher
from fsdmoe.experts.dispatch.allgather import AllGatherDispatcher
from fsdmoe.experts.dispatch.base import CountingDispatcher, Dispatcher, DispatchPlan, Rows
from fsdmoe.experts.dispatch.chunks import chunk_sizes
from fsdmoe.experts.dispatch.cloning import CloningDispatcher
from fsdmoe.experts.dispatch.resend import Resend
from fsdmoe.experts.dispatch.transfer import AsyncCollective
from fsdmoe.memory.layer_call import current_call


class _SendsAgain(CountingDispatcher):
    """A dispatcher's phases, with what a second way of its rows needs to know of the first. Where nothing is
    saved by name (evaluation, layers that are run again as a whole) they are those of the dispatcher."""

    def prepare(self, rows: Rows) -> tuple[DispatchPlan, Rows]:
        plan, sent = super().prepare(rows)
        return _noting(plan, rows), sent

    def prepare_chunks(self, rows: Rows, chunks: int) -> Iterator[tuple[DispatchPlan, Rows]]:
        pieces = rows.split(chunk_sizes(rows.ids_RK.shape[0], chunks))
        for piece, (plan, sent) in zip(pieces, super().prepare_chunks(rows, chunks), strict=True):
            yield _noting(plan, piece), sent

    def dispatch(self, plan: DispatchPlan, rows: Rows) -> AsyncCollective:
        started = super().dispatch(plan, rows)  # type: ignore[safe-super]
        assert isinstance(started, AsyncCollective)
        if plan.resend is not None:
            plan.resend.sent_by(started)
        return started

    def gather(self, plan: DispatchPlan, started: AsyncCollective | Rows) -> Rows:
        rows = super().gather(plan, started)
        if plan.resend is not None:
            plan.resend.release(rows.x_RD)
        return rows

    def restore(self, plan: DispatchPlan, started: AsyncCollective | Tensor) -> Tensor:
        if plan.resend is not None:
            assert isinstance(started, AsyncCollective)
            started = plan.resend.with_outputs(started, plan.permutation)
        return super().restore(plan, started)


def _noting(plan: DispatchPlan, rows: Rows) -> DispatchPlan:
    call = current_call()
    plan.resend = None if call is None else Resend(call, rows.x_RD)
    return plan


class _AllToAllAgain(_SendsAgain, AllToAllDispatcher):
    pass


class _AllGatherAgain(_SendsAgain, AllGatherDispatcher):
    pass


class _CloningAgain(_SendsAgain, CloningDispatcher):
    pass


def sending_again(dispatcher: Dispatcher) -> Dispatcher:
    """A dispatcher like this one whose rows are sent again in backward; itself where nothing is sent."""
    if not dispatcher.crosses_ranks or isinstance(dispatcher, _SendsAgain):
        return dispatcher
    same = dispatcher.links, dispatcher.num_experts, dispatcher.packing
    if isinstance(dispatcher, CloningDispatcher):
        return _CloningAgain(*same, policy=dispatcher.clones)
    if dispatcher.links.etp.size == 1:
        if type(dispatcher) is AllToAllDispatcher:
            return _AllToAllAgain(*same)
        if type(dispatcher) is AllGatherDispatcher:
            return _AllGatherAgain(*same)
    raise AssertionError(f"rows sent again by {dispatcher.name}, which fsdmoe.config.compatibility refuses")
