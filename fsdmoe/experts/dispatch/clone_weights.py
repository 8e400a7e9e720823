"""Weights of clones on their way there, and their gradients on their way home.

::

    CloneWeights(exchange, own)               weights.wait()  ->  what computes with this rank's clones too
      forward: starts the exchange              forward: waits for it
      backward: waits for gradients, adds       backward: starts the exchange of gradients, in fp32

All ranks take part whether they have clones or not: a rank without any would not reach the second node in
backward, so every output of experts is tied to it (:meth:`CloneWeights.tie`). Gradients are added one by one
in the order of ranks, so that a run can be repeated bit by bit.

Both nodes are made before rows are waited for. So in backward gradients of rows leave first, then those of
clones, once the experts' own gradients are there too (autograd runs what is ready in the reverse of the order
in which it was made).

How they travel is the exchange's (:mod:`fsdmoe.experts.dispatch.clone_exchange`).

Weights that are codes travel as codes, with their scales.

Ties save the weights of clones for backward. With ``experts.clone_keep = false`` they save nothing: weights
are sent again when the gradients of outputs are there, which the first tie in backward starts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.experts.dispatch.clone_exchange import CloneExchange
from fsdmoe.experts.dispatch.transfer import Pending
from fsdmoe.kernels.cloned_experts import experts_mlp_cloned
from fsdmoe.kernels.expert_mlp import ExpertFunction
from fsdmoe.kernels.expert_operands import ExpertWeights
from fsdmoe.kernels.grad_sink import GradSink, refuse_homeless, sink_of
from fsdmoe.precision.quantized_weight import QuantizedWeight, scales_of

_PROJECTIONS = ExpertWeights._fields[:2]


def _travelling(own: ExpertWeights) -> dict[str, Tensor]:
    """Weights and biases by their names, then the scales of projections that are codes."""
    found = {name: weight for name, weight in own._asdict().items() if weight is not None}
    for name in _PROJECTIONS:
        scales = scales_of(found[name])
        if scales is not None:
            found[_scales_name(name)] = scales.scales
    return found


def _scales_name(projection: str) -> str:
    return f"{projection}.scales"


def _is_bias(name: str) -> bool:
    return name.endswith("bias")


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """Gradients of weights of that type, codes included."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _CloneGrad:
    """The gradient of a clone's weight in fp32, which is sent home."""

    def __init__(self, like: Tensor) -> None:
        self._shape = like.shape
        self._dtype = _summed_in(like.dtype)
        self._device = like.device
        self.buffer: Tensor | None = None

    def claim(self) -> tuple[Tensor, bool]:
        accumulate = self.buffer is not None
        if self.buffer is None:
            self.buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self.buffer, accumulate

    def take(self, other: Tensor | None) -> Tensor:
        """What was written; of a bias ``other``, which came through autograd."""
        found = self.buffer
        self.buffer = None
        if found is not None:
            return found
        if other is not None:
            return other.to(self._dtype)
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)


@dataclass
class _CloneTransit:
    """What the nodes of one exchange share. Never a tensor with a history; weights that were received only
    while a backward uses them."""

    exchange: CloneExchange
    own: dict[str, Tensor]
    """What travels (:func:`_travelling`): parameters and scales. Their owner keeps them, and has them in
    place when backward runs."""
    keeps: bool
    """Ties save the weights of clones."""
    outbound: list[Pending] = field(default_factory=list)
    grads: list[_CloneGrad] = field(default_factory=list)
    homebound: Any = None
    """Gradients under way, as the exchange knows them."""
    num_ties: int = 0
    """Chunks, which all use the same clones."""
    task: int = -1
    """The backward that the following is of."""
    here: Sequence[Tensor] = ()
    """What was saved of clones: all but biases."""
    again: list[Pending] | None = None
    """Those that were sent again, under way or here."""
    joined: tuple[Tensor, Tensor] | None = None
    """Both projections with clones behind them."""
    num_used: int = 0
    """Chunks that need them no more."""

    def send(self) -> list[Pending]:
        return self.exchange.send([*self.own.values()])

    @property
    def kept_names(self) -> list[str]:
        return [name for name in self.own if not _is_bias(name)]

    def begin_backward(self, saved: Sequence[Tensor]) -> None:
        """A tie is reached, before the experts whose outputs it tied."""
        task = torch._C._current_graph_task_id()
        if task != self.task:  # the first of this backward; one for other tensors may have left gradients
            self.task = task
            self.release()
            for grad in self.grads:
                grad.buffer = None
        self.here = saved
        if not self.keeps and self.again is None:
            self.again = self.send()

    def joined_again(self) -> tuple[Tensor, Tensor]:
        """See :class:`~fsdmoe.kernels.cloned_products.ClonesHere`."""
        if self.joined is None:
            if self.again is None:
                received = dict(zip(self.kept_names, self.here, strict=True))
            else:
                received = dict(zip(self.own, [wait() for wait in self.again], strict=True))
            # Without a history: gradients of both have places of their own.
            both = {name: torch.cat((self.own[name].detach(), received[name])) for name in self.kept_names}
            gate_up, down = (_with_scales(self.own[name], both, name) for name in _PROJECTIONS)
            self.joined = gate_up, down
        return self.joined

    def used(self) -> None:
        """See there."""
        self.num_used += 1
        if self.num_used == self.num_ties:
            self.release()

    def release(self) -> None:
        self.here = ()
        self.again = None
        self.joined = None
        self.num_used = 0

    def grad_place(self, number: int) -> tuple[Tensor, bool]:
        return self.grads[number].claim()

    def send_home(self, gradients: Sequence[Tensor | None]) -> None:
        """Of weights that need some, which all ranks know alike."""
        taken = [
            sink.take(given)
            for sink, given, weight in zip(self.grads, gradients, self.own.values(), strict=True)
            if weight.requires_grad
        ]
        self.homebound = self.exchange.send_home(taken)


class CloneWeights:
    """Those of one layer's clones on this rank; for the caller alone, no autograd node may hold it."""

    def __init__(self, exchange: CloneExchange, own: ExpertWeights, *, keep: bool) -> None:
        """Starts the exchange. To be called before rows are waited for: so in backward gradients are added
        once the experts' own are there, and before the layer is done."""
        self._transit = _CloneTransit(exchange, _travelling(own), keep)
        self._handle: Tensor = _Send.apply(self._transit, *self._transit.own.values())
        self._is_waited_for = False
        self._kept: list[Tensor] = []
        self._mlp: ExpertFunction | None = None

    def wait(self) -> ExpertFunction | None:
        """What computes this rank's experts and the clones behind them, for every chunk; None without
        clones."""
        if self._is_waited_for:
            return self._mlp
        self._is_waited_for = True
        transit = self._transit
        own, num_here, kept = transit.own, transit.exchange.num_here, transit.kept_names
        # Own ones are copied while rows and clones are under way.
        both = {name: _with_slots(own[name], num_here) for name in kept} if num_here else {}
        *landed, self._handle = _Receive.apply(transit, self._handle)
        if num_here:
            received = dict(zip(own, landed, strict=True))
            if transit.keeps:
                self._kept = [received[name].detach() for name in kept]
            for name in kept:
                both[name][-num_here:] = received[name].detach()
            joined = {name: _with_scales(own[name], both, name) for name in _PROJECTIONS}
            joined |= {name: torch.cat((own[name], received[name])) for name in own if _is_bias(name)}
            self._mlp = functools.partial(experts_mlp_cloned, ExpertWeights(**joined), transit)
        return self._mlp

    def tie(self, y_RD: Tensor) -> Tensor:
        """``y_RD``, whose backward leads to this exchange's on every rank."""
        return _Tie.apply(self._transit, y_RD, self._handle, *self._kept)


def _with_slots(own: Tensor, num_clones: int) -> Tensor:
    """A copy, with memory for clones behind it."""
    own = own.detach()
    joined = own.new_empty(len(own) + num_clones, *own.shape[1:])
    joined[: len(own)] = own
    return joined


def _with_scales(own: Tensor, both: Mapping[str, Tensor], name: str) -> Tensor:
    """A projection with clones behind it, of ``both``: as codes with scales where its ``own`` are."""
    scales = scales_of(own)
    if scales is None:
        return both[name]
    joined = scales._replace(scales=both[_scales_name(name)], transposed=None)
    return QuantizedWeight(both[name], requires_grad=False, scales=joined)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit: _CloneTransit, *weights):
        ctx.transit = transit
        ctx.sinks = [sink_of(weight) for weight in weights]
        transit.outbound = transit.send()
        return torch.empty(0, device=weights[0].device)  # not of codes, which have no gradients

    @staticmethod
    @once_differentiable
    def backward(ctx, _handle):
        transit: _CloneTransit = ctx.transit
        exchange = transit.exchange
        homebound, transit.homebound = transit.homebound, None
        totals = [
            _OwnGrad(weight, sink, exchange.are_away) if weight.requires_grad else None
            for weight, sink in zip(transit.own.values(), ctx.sinks, strict=True)
        ]
        exchange.add_home(homebound, [each.total for each in totals if each is not None])
        return None, *[None if each is None else each.for_autograd() for each in totals]


class _OwnGrad:
    """The gradient of a rank's own weight, for its clones' to be added to."""

    def __init__(self, weight: Tensor, sink: GradSink | None, wanted: bool) -> None:
        self._dtype = weight.dtype
        self._is_new = wanted and sink is None
        if self._is_new and scales_of(weight) is not None:
            refuse_homeless(sink)
        self.total: Tensor | None = None
        """None where nothing is to be added."""
        if self._is_new:
            self.total = torch.zeros(weight.shape, dtype=_summed_in(weight.dtype), device=weight.device)
        elif wanted and sink is not None and (claimed := sink.claim()) is not None:
            self.total, accumulate = claimed
            if not accumulate:
                self.total.zero_()

    def for_autograd(self) -> Tensor | None:
        """What is left for it."""
        return self.total.to(self._dtype) if self._is_new and self.total is not None else None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit: _CloneTransit, handle):
        ctx.transit = transit
        ctx.set_materialize_grads(False)
        # Emptied: what a pending exchange returns gets this node as its history.
        pending, transit.outbound = transit.outbound, []
        received = [wait() for wait in pending]
        transit.grads = [_CloneGrad(weight) for weight in received]
        return *received, handle.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        transit: _CloneTransit = ctx.transit
        transit.release()  # where this rank has no clones, nobody else did
        transit.send_home(gradients[:-1])
        return None, torch.empty(0, device=transit.own["gate_up_E2ND"].device)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transit: _CloneTransit, y_RD, handle, *kept):
        ctx.transit = transit
        transit.num_ties += 1
        ctx.save_for_backward(handle, *kept)
        return y_RD.view_as(y_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RD):
        transit: _CloneTransit = ctx.transit
        # Where the layer is run again in backward, that begins here on all ranks: it exchanges counts and
        # rows, and a rank without clones would do so only after the gradients of clones, others before.
        handle, *kept = ctx.saved_tensors
        transit.begin_backward(kept)
        return None, dy_RD, handle.new_empty(0), *(None for _ in kept)
