"""Sends rows to the ranks of their experts, computes them there and sends the outputs back, chunk by chunk.

A rank's rows are cut into chunks (``experts.chunks``). Each chunk passes through the dispatcher's phases
separately, and is sent while another one is computed::

    sent       D0 D1 ──── C0 D2 ──── C1 D3 ──── C2 ──── C3         D: dispatch, to the experts
    computed      S  ─K0── ──K1──── ──K2──── ─K3── R0 R1 R2  R3    C: combine, back   K: experts   R: restore
                                                                   S: shared experts
    backward, the same from right to left, read from left to right as time goes on:
    sent       C3 C2 C1 C0 ── D3 ─────── D2 ─────── D1 ─────── D0
    computed     R ───K3── W3 ──K2── W2 ──K1── W1 ──K0── W0 S  P3 P2 P1 P0

                                  W: weights' gradients   P: rows' gradients, back in the order of tokens

Autograd runs ready nodes in the reverse of the order in which they were made. So the order of the calls below
*is* the schedule of backward: every start becomes a wait, and every wait a start. A chunk that is sent during
some compute in forward is sent during the same compute's backward. All ranks send the same number of chunks
in the same order, even if they have no rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsdmoe.core.autograd import is_in_backward
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.dispatch import Dispatcher, DispatchPlan, Rows, sending_again
from fsdmoe.experts.dispatch.transfer import AsyncCollective
from fsdmoe.experts.shared import SideStream
from fsdmoe.kernels.expert_mlp import ExpertFunction


class Dispatching(NamedTuple):
    """Rows on their way to the experts, and what is computed meanwhile."""

    plan: DispatchPlan
    leaving: AsyncCollective | Rows
    other_TD: Tensor | None


class Combining(NamedTuple):
    """Rows on their way back."""

    plan: DispatchPlan
    returning: AsyncCollective | Tensor
    other_TD: Tensor | None


# T: tokens of this rank; R: rows that reached it; D: hidden width.
Compute = Callable[[Rows, int | None], Tensor]
Concurrent = Callable[[Tensor], Tensor]


class Begin(Protocol):
    """What computes the rows of a chunk; by ``mlp``, where the experts' own function does not."""

    def __call__(self, mlp: ExpertFunction | None = None) -> Compute: ...


class RoutedExperts:
    """The dispatcher's six phases around the experts' compute, for every chunk.

    It holds nothing of the layer that owns it: what to compute comes with each call."""

    def __init__(
        self, dispatcher: Dispatcher, chunks: int = 1, transfer_sms: int = 0, sub_batches: int = 1
    ) -> None:
        """``transfer_sms``: multiprocessors that an exchange takes, see ``experts.transfer_sms``.
        ``sub_batches``: how many calls of :meth:`start_dispatch` are under way at once."""
        for key, value, takes in (
            ("chunks", chunks, dispatcher.takes_chunks),
            ("sub_batches", sub_batches, dispatcher.takes_sub_batches),
        ):
            if value > 1 and not takes:
                raise ConfigError(
                    f"experts.{key}: expected 1 with the dispatcher {dispatcher.name}, got {value}; set it "
                    "to 1, or choose another experts.dispatcher"
                )
        self.dispatcher = dispatcher
        self.chunks = chunks
        self.sub_batches = sub_batches if dispatcher.crosses_ranks else 1
        self.transfer_sms = transfer_sms if dispatcher.crosses_ranks else 0
        self._side = SideStream()

    def send_again(self) -> None:
        """From now on, rows that experts received are not kept for backward, which sends them again."""
        self.dispatcher = sending_again(self.dispatcher)

    def run(
        self, rows: Rows, begin: Begin, concurrent: Concurrent | None = None, x_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' output for each of ``rows``, and that of ``concurrent`` for ``x_TD``.

        ``begin()`` returns the function that computes a chunk: ``compute(rows, max_rows)`` is the output of
        the rows that reached this rank (under ETP, this rank's part of the sum). It is called before the
        chunk is waited for, so that in backward weights' gradients come after the start of the rows' transfer
        (:mod:`fsdmoe.kernels.late_grads`). ``concurrent`` runs on a second stream while rows are sent."""
        if self.chunks > 1 and self.dispatcher.crosses_ranks:
            return self._run_in_chunks(rows, begin, concurrent, x_TD)
        plan, returning, other_TD = self.start_combine(self.start_dispatch(rows, concurrent, x_TD), begin)
        return self.dispatcher.restore(plan, returning), self.join(other_TD)

    def start_dispatch(self, rows: Rows, concurrent: Concurrent | None, x_TD: Tensor | None) -> Dispatching:
        """The first half of one chunk, for callers with something to compute before the second."""
        plan, rows = self.dispatcher.prepare(rows)
        leaving = self.dispatcher.dispatch(plan, rows)
        del rows  # once sent, a copy in sending order is of no use
        return Dispatching(plan, leaving, self._concurrent(concurrent, x_TD))

    def start_combine(self, dispatching: Dispatching, begin: Begin) -> Combining:
        """The second half: wait for the rows, compute them, start to send them back. The caller then calls
        ``dispatcher.restore``, and :meth:`join` before the layer's forward ends, which frees its weights."""
        plan, leaving, other_TD = dispatching
        return Combining(plan, self._send_back(plan, self._compute(plan, leaving, begin)), other_TD)

    def join(self, other_TD: Tensor | None) -> Tensor | None:
        """The output of ``concurrent``, for the stream that goes on with it."""
        return None if other_TD is None else self._side.join(other_TD)

    def _run_in_chunks(
        self, rows: Rows, begin: Begin, concurrent: Concurrent | None, x_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        departures = self._departures(rows)
        under_way = deque(islice(departures, 2))
        other_TD = self._concurrent(concurrent, x_TD)
        computed: list[tuple[DispatchPlan, Tensor]] = []
        returning: list[tuple[DispatchPlan, AsyncCollective | Tensor]] = []
        # Recomputation in backward stops at the last tensor that backward needs. That is usually inside the
        # last chunk's compute, so outputs are not sent back before it is done.
        holds_outputs = is_in_backward()
        while under_way:
            plan, leaving = under_way.popleft()
            computed.append((plan, self._compute(plan, leaving, begin)))
            if not (holds_outputs and under_way):
                returning += ((plan, self._send_back(plan, y_RD)) for plan, y_RD in computed)
                computed.clear()
            under_way.extend(islice(departures, 1))  # before the next chunk is waited for
        # All chunks at the end: restoring the first ones hides the last one's way back.
        y_TD = torch.cat([self.dispatcher.restore(plan, started) for plan, started in returning])
        return y_TD, self.join(other_TD)

    def _departures(self, rows: Rows) -> Iterator[tuple[DispatchPlan, AsyncCollective | Rows]]:
        """Starts the next chunk's way to the experts whenever it is asked."""
        for plan, chunk in self.dispatcher.prepare_chunks(rows, self.chunks):
            started = self.dispatcher.dispatch(plan, chunk)
            del chunk
            yield plan, started

    @property
    def spare_sms(self) -> int:
        """Multiprocessors that all of the experts' products leave to concurrent exchanges."""
        return self.transfer_sms if max(self.chunks, self.sub_batches) > 1 else 0

    def _concurrent(self, concurrent: Concurrent | None, x_TD: Tensor | None) -> Tensor | None:
        """To be called once rows are under way, not before."""
        return None if concurrent is None or x_TD is None else self._side.run(concurrent, x_TD)

    def _compute(self, plan: DispatchPlan, leaving: AsyncCollective | Rows, begin: Begin) -> Tensor:
        compute = begin()
        return compute(self.dispatcher.gather(plan, leaving), plan.max_rows)

    def _send_back(self, plan: DispatchPlan, y_RD: Tensor) -> AsyncCollective | Tensor:
        return self.dispatcher.combine(plan, self.dispatcher.reduce(plan, y_RD))
