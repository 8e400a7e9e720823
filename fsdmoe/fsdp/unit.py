"""One unit: a module whose weights are gathered together, and the states that its weights go through.

A unit that was released keeps its gathered weights until another unit needs the slot, or the weights change;
what is still there is not gathered again.

===========  =======================  ===========================  ==========================
state        the slot holds           entered by                   left by
===========  =======================  ===========================  ==========================
SHARDED      another unit's weights   eviction, changed weights    ``issue``: takes the slot
GATHERING    weights on their way     ``issue``                    ``make_ready``
READY        this unit's weights      ``make_ready``               eviction, changed weights
===========  =======================  ===========================  ==========================

A unit is *pinned* while its module's forward runs (``depth`` > 0), from its pre-backward to its finish
(``in_backward``), and while a user looks at its whole weights (``is_held``). A prefetch never evicts a pinned
tenant. A unit that must compute now does: one that a user holds, whose module then shows sharded parameters
again; or, when recomputation spans several units, one that is gathered again when its own turn in the
recomputation comes.

Its gradient is :class:`fsdmoe.fsdp.grads.GradBuffer`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fsdmoe.fsdp.buffer import Slot
from fsdmoe.fsdp.collectives import CommStreams, Event
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.grads import GradBuffer
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.sharded_tensor import plain_attributes
from fsdmoe.fsdp.subclass import FlatSubclass
from fsdmoe.fsdp.units import is_plain_embedding


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    READY = auto()


class WeightSlot(Slot):
    """Memory for gathered weights that units use in turn."""

    tenant: Unit | None = None
    free: Event
    """The last tenant is done with it."""


class Unit:
    """The state of a unit's weights and the only operations that change it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        grads: GradBuffer,
        slot: WeightSlot | None,
        streams: CommStreams,
        *,
        is_root: bool,
        debug: bool,
    ) -> None:
        self.name = name
        self.module, self.groups, self.grads, self.slot = module, list(groups), grads, slot
        self.is_root, self.debug = is_root, debug
        self.state = State.SHARDED if self.slot is not None else State.READY
        self.depth = 0
        self.in_backward = False
        self.is_held = False
        """A user gathered the weights and has not let go of them; see :meth:`hold`."""
        self.num_awaited_backwards = 0
        """Forward calls whose backward has not begun."""
        self.ran_with_grad = False
        """Some forward call with these weights, recomputation aside, recorded a graph. An evaluation leaves
        it as it is: a graph that was retained may still be differentiated."""
        self.weights_epoch = 0
        """How often the weights were found changed."""
        self.gathers_in_backward = not is_plain_embedding(module)
        self.subclasses: list[FlatSubclass] = []
        self.places: list[tuple[nn.Module, str, FlatParam | FlatSubclass]] = []
        """Where its parameters are registered, each with the two that take turns there."""
        self._add_places(self.params)
        self._stream, self._gathered = streams.gather, streams.gather.handle()
        self._gather_stages = [stage for group in groups for stage in group.weights.gather_stages()]

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.name.lower()})"

    @property
    def pinned(self) -> bool:
        return self.depth > 0 or self.in_backward or self.is_held

    @property
    def params(self) -> list[FlatParam]:
        return [param for group in self.groups for param in group.params]

    def assemble(self, subclasses: list[FlatSubclass]) -> None:
        """Put parameters together again that were taken apart; called once, when the groups are bound."""
        by_name = {param.name: param for param in self.params}
        for whole in subclasses:
            whole.bind(by_name)
        self.subclasses = subclasses
        self._add_places(subclasses)

    def _add_places(self, params: Iterable[FlatParam | FlatSubclass]) -> None:
        self.places += [(module, attribute, each) for each in params for module, attribute in each.places]

    def check_parameters(self) -> None:
        """Raise if the modules hold other parameters than those that were given to them."""
        changed = [param.name for param in self.subclasses if not param.is_intact()]
        lost = []
        with plain_attributes():
            for group in self.groups:
                trained = group.plan.requires_grad
                is_copy = group.plan.gathered or group.weights.shard is not group.weights.main
                for param in group.params:
                    if not param.is_intact() or param.sharded.requires_grad != trained:
                        changed.append(param.name)
                    if is_copy and param.unsharded._version != param.version:
                        lost.append(param.name)
        if changed:
            raise RuntimeError(
                f"{changed[0]} of {self.name} was exchanged, converted, rebound or (un)frozen after "
                "fully_shard, so the engine's buffers no longer hold it; change values in place (copy_, "
                "load_state_dict), and convert or freeze parameters before fully_shard"
            )
        if lost:
            raise RuntimeError(
                f"{lost[0]} of {self.name} was changed in place in forward (max_norm of an embedding "
                "does so): there it is a gathered copy, and the change is lost with it; change the model's "
                "parameter between two forwards"
            )

    @property
    def has_changed(self) -> bool:
        """Weights were written since the last :meth:`refresh`."""
        return any(group.weights.has_changed for group in self.groups)

    def refresh(self) -> bool:
        """Take up what was written to the weights; whether anything was."""
        changed = [group.weights.refresh() for group in self.groups]  # every group, not up to the first
        if any(changed):
            self.weights_epoch += 1
            self.ran_with_grad = False
        return any(changed)

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
        self._stream.run(self._gathered, self._gather_stages, slot.free)
        self.state = State.GATHERING
        return True

    def make_ready(self) -> None:
        """The weights are in the slot for whatever the caller computes next."""
        if self.state is not State.READY:
            self.issue(evict_pinned=True)
            self._gathered.wait()
            self.state = State.READY
        for group in self.groups:
            group.weights.guard.wait()

    def evict(self) -> None:
        """The slot is about to be overwritten, or its content is out of date."""
        if self.slot is None:
            return
        if self.state is State.GATHERING:
            self._gathered.wait()
        if self.pinned:
            self.slot.free.record()
        if self.is_held:  # what its module shows is about to be another unit's weights
            self.is_held = False
            self.to_sharded()
        self.state = State.SHARDED

    def release(self) -> None:
        """The caller is done computing with the weights; they stay until another unit needs the slot."""
        if self.slot is None or self.pinned:
            return
        if self.slot.tenant is not self:
            return
        if self.debug and self.slot.shared:
            for buffer in self.slot.buffers.values():
                buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
            self.evict()
        self.slot.free.record()

    def hold(self) -> None:
        """Let the module show whole weights outside of its forward, until :meth:`let_go`, its own next
        forward, or another unit must compute in the same slot."""
        if not self.issue(evict_pinned=False):
            assert self.slot is not None
            assert self.slot.tenant is not None
            raise RuntimeError(
                f"{self.name} cannot be gathered: {self.slot.tenant.name} is in its memory, and is held by "
                "unshard() or computes; reshard() that one first, or give each memory of its own "
                "(reshard_after_forward=False)"
            )
        self.make_ready()
        self.is_held = True
        self.to_unsharded()

    def let_go(self) -> None:
        """Show sharded parameters again; the gathered weights stay until somebody needs the slot."""
        if self.is_held:
            self.is_held = False
            self.to_sharded()
            self.release()

    def restore(self, after: State) -> None:
        """A CUDA graph was replayed that gathered weights, and left this state when it was captured."""
        self.state, self.ran_with_grad = after, True
        if self.slot is not None:
            if after is State.READY:
                self.slot.tenant = self
            self.slot.free.record()  # behind the replay

    def install(self) -> None:
        """Put the sharded parameters in the place of the module's own, for the first time."""
        for module, attribute, param in self.places:
            module._parameters[attribute] = param.sharded

    def to_unsharded(self) -> None:
        for module, attribute, param in self.places:
            module._parameters[attribute] = param.unsharded

    def to_sharded(self) -> None:
        for module, attribute, param in self.places:
            # A parameter that somebody put there meanwhile stays, to be refused by check_parameters.
            if module._parameters.get(attribute) is param.unsharded:
                module._parameters[attribute] = param.sharded


def accumulates_any(units: Iterable[Unit]) -> bool:
    """Whether the backward under way writes gradients of parameters: ``torch.autograd.grad`` does not.

    One parameter that autograd is about to reach decides it. A parameter that this rank does not use is in no
    graph, so all are checked before the answer is no: ranks must agree on it."""
    for unit in units:
        for param in unit.grads.param_grads:
            node = get_gradient_edge(param.param.unsharded).node
            if torch._C._will_engine_execute_node(node):
                return True
    return False
