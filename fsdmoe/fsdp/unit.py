"""One unit: a module whose weights are gathered together, and the states it goes through.

Weights. A unit that was released keeps its gathered weights until somebody else needs the slot, or the
weights change; what is still there is not gathered again.

===========  =======================  ===========================  ==========================
state        the slot holds           entered by                   left by
===========  =======================  ===========================  ==========================
SHARDED      somebody else's weights  eviction, changed weights    ``issue``: takes the slot
GATHERING    weights on their way     ``issue``                    ``make_ready``
READY        this unit's weights      ``make_ready``               eviction, changed weights
===========  =======================  ===========================  ==========================

A unit is *pinned* while its module's forward runs (``depth`` > 0) and from its pre-backward to its finish
(``in_backward``). A prefetch never evicts a pinned tenant. Somebody who must compute now does: that happens
only when recomputation spans several units, and the evicted unit is gathered again when its own turn in the
recomputation comes.

Gradients. Each unit has one gradient slot.

===========  ===================================  =====================================================
closed       nothing of this unit is in the slot  pre-backward opens it, once the last reduction is out
open         backward writes into it              ``reduce``, at a point that every rank reaches: the
                                                  next unit's pre-backward, or the end of backward
reducing     the reduce lane reads it             whoever opens the slot next waits
===========  ===================================  =====================================================

Everything that leads to a collective depends on the order in which units run and on nothing else, so that
all ranks issue the same collectives in the same order even if a parameter is used on some of them only."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from functools import partial

import torch
from torch import nn

from fsdmoe.fsdp.buffer import Slot
from fsdmoe.fsdp.collectives import Lanes, Stage, Ticket
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.param_group import GradState, ParamGroup
from fsdmoe.kernels.linear import Embedding


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    READY = auto()


class GradSlot(Slot):
    """A slot for gradients; ``reducing`` is the transfer that still reads it."""

    reducing: Ticket | None = None
    layout_key: object = None
    """Whose padding is zero in it."""
    stager: Unit | None = None
    """Whose forward left gradients in it last."""

    def await_reduction(self) -> None:
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None


class Unit:
    """A unit's state and the only operations that change it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        slots: tuple[Slot | None, GradSlot | None],
        lanes: Lanes,
        *,
        is_root: bool,
        debug: bool,
    ) -> None:
        self.name = name or "the root module"
        self.module, self.groups = module, list(groups)
        self.slot, self.grad_slot = slots
        self.is_root, self.debug = is_root, debug
        self.trainable = [group for group in groups if group.plan.requires_grad]
        self.state = State.SHARDED if self.slot is not None else State.READY
        self.depth = 0
        self.in_backward = False
        self.grads_open = False
        self.announced = 0
        """Forward calls whose backward has not begun."""
        self.ran_with_grad = False
        """The last forward call, recomputation aside, recorded a graph."""
        self.gathers_in_backward = not is_plain_embedding(module)
        self._lanes = lanes
        self._gather_ticket, self._reduce_ticket = lanes.gather.ticket(), lanes.reduce.ticket()
        self._written = lanes.mark()
        self._gather_stages: list[Stage] = [stage for group in groups for stage in group.gather_stages()]
        self._layout_key = tuple(group.layout_key for group in self.trainable)
        for group in groups:
            group.refuse_gradient = self._refuse_gradient
            group.can_stage = partial(self._can_stage, group)

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.name.lower()})"

    @property
    def pinned(self) -> bool:
        return self.depth > 0 or self.in_backward

    @property
    def params(self) -> list[FlatParam]:
        return [param for group in self.groups for param in group.params]

    # Weights

    def issue(self, *, evict_pinned: bool) -> bool:
        """Start gathering unless the weights are there or coming; False if the slot cannot be had."""
        if self.state is not State.SHARDED:
            return True
        slot = self.slot
        assert slot is not None
        if slot.tenant is not None and slot.tenant is not self:
            if slot.tenant.pinned and not evict_pinned:
                return False
            slot.tenant.evict()
        slot.tenant = self
        self._lanes.gather.run(self._gather_ticket, self._gather_stages, slot.free)
        self.state = State.GATHERING
        return True

    def make_ready(self) -> None:
        """The weights are in the slot for whatever the caller computes next."""
        if self.state is not State.READY:
            self.issue(evict_pinned=True)
            self._gather_ticket.wait()
            self.state = State.READY

    def evict(self) -> None:
        """The slot is about to be overwritten, or its content is out of date."""
        if self.slot is None:
            return
        if self.state is State.GATHERING:
            self._gather_ticket.wait()
        if self.pinned:
            self.slot.free.record()
        self.state = State.SHARDED

    def release(self) -> None:
        """The caller is done computing with the weights; they stay until somebody needs the slot."""
        if self.slot is None or self.pinned:
            return
        if self.slot.tenant is not self:
            return
        if self.debug and self.slot.shared:
            for buffer in self.slot.buffers.values():
                buffer.fill_(float("nan"))
            self.evict()
        self.slot.free.record()

    def show_full(self) -> None:
        for group in self.groups:
            for param in group.params:
                param.show(param.full)

    def show_sharded(self) -> None:
        for group in self.groups:
            for param in group.params:
                param.show(param.sharded)

    # Gradients

    def open_grads(self) -> None:
        """Make the gradient slot this unit's; an earlier tenant that is still open is reduced first."""
        slot = self.grad_slot
        if slot is not None:
            if slot.tenant is not None and slot.tenant is not self and slot.tenant.grads_open:
                slot.tenant.reduce(last=False)
            slot.await_reduction()
            if slot.stager is not None and slot.stager is not self:
                slot.stager.unstage()
                slot.stager = None
            if slot.layout_key != self._layout_key:
                slot.layout_key = self._layout_key
                for group in self.trainable:
                    group.zero_padding()
            slot.tenant = self
        for group in self.trainable:
            group.open_grads()
        self.grads_open = True

    def _can_stage(self, group: ParamGroup) -> bool:
        """Whether forward may leave a gradient of ``group`` where its backward will want it."""
        if self.depth == 0 or self.grads_open or is_in_backward():
            return False
        if not group.plan.reduced:
            group.take_grad_memory()
            group.notice_dropped()
            return group.grad_state is GradState.EMPTY
        slot = self.grad_slot
        assert slot is not None
        for other in (slot.tenant, slot.stager):
            if other is not None and other is not self and (other.grads_open or other.is_staged):
                return False
        slot.await_reduction()
        if slot.layout_key != self._layout_key:
            slot.layout_key = None  # what is staged may lie in the last tenant's padding
        slot.stager = self
        return True

    @property
    def is_staged(self) -> bool:
        return any(param.is_staged for param in self.params)

    def unstage(self) -> None:
        """Somebody else needs the slot: gradients that wait for their backward move out."""
        for param in self.params:
            param.make_room()

    def reduce(self, *, last: bool) -> None:
        """Close the gradients and send them on their way into the main gradients."""
        self.grads_open = False
        stages = [stage for group in self.trainable for stage in group.reduce_stages(last=last)]
        self._start_reduction(stages)

    def finalize(self) -> None:
        """Sum over replicas what earlier micro-batches left partial."""
        groups = [group for group in self.trainable if group.is_partial]
        self._start_reduction([stage for group in groups for stage in group.final_stages()])

    def drop_grads(self) -> None:
        """Forget what an interrupted backward wrote."""
        self.grads_open = False
        for group in self.trainable:
            group.grads_open = False

    def _start_reduction(self, stages: list[Stage]) -> None:
        if not stages:
            return
        self._written.record()
        self._lanes.reduce.run(self._reduce_ticket, stages, self._written)
        if self.grad_slot is not None:
            self.grad_slot.reducing = self._reduce_ticket
            if any(group.exchange_spoils_padding for group in self.trainable):
                self.grad_slot.layout_key = None

    def _refuse_gradient(self, parameter: str) -> None:
        raise RuntimeError(
            f"a gradient of {parameter} arrived while the backward of {self.name} was not under way. Either "
            "its forward ran in a re-entrant checkpoint (pass use_reentrant=False), or it returned tensors "
            "inside an object that is not a tuple, list, dict or dataclass, or the parameter was used "
            "outside of its forward"
        )


def is_in_backward() -> bool:
    """Autograd runs on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def is_plain_embedding(module: nn.Module) -> bool:
    """An embedding's gradient needs indices only, unless somebody wrapped its forward to be run again."""
    return type(module) in (nn.Embedding, Embedding) and "forward" not in vars(module)
