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

A unit is *pinned* while its module's forward runs (``depth`` > 0) and from its pre-backward to its finish
(``in_backward``). A prefetch never evicts a pinned tenant. A unit that must compute now does: that happens
only when recomputation spans several units, and the evicted unit is gathered again when its own turn in the
recomputation comes.

Its gradient is :class:`fsdmoe.fsdp.grads.GradBuffer`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import nn

from fsdmoe.fsdp.buffer import Slot
from fsdmoe.fsdp.collectives import CommStreams, Event, Stage
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.grads import GradBuffer
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.subclass import FlatSubclass
from fsdmoe.kernels.linear import Embedding


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    READY = auto()


class WeightSlot(Slot):
    """Memory for gathered weights that units use in turn."""

    def __init__(
        self, name: str, buffers: dict[torch.dtype, torch.Tensor], *, shared: bool, free: Event
    ) -> None:
        super().__init__(name, buffers, shared=shared)
        self.tenant: Unit | None = None
        self.free = free
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
        self.num_awaited_backwards = 0
        """Forward calls whose backward has not begun."""
        self.ran_with_grad = False
        """The last forward call, recomputation aside, recorded a graph."""
        self.weights_epoch = 0
        """How often the weights were found changed."""
        self.gathers_in_backward = not is_plain_embedding(module)
        self._subclasses: list[FlatSubclass] = []
        self._stream, self._gathered = streams.gather, streams.gather.handle()
        self._gather_stages: list[Stage] = [stage for group in groups for stage in group.gather_stages()]

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.name.lower()})"

    @property
    def pinned(self) -> bool:
        return self.depth > 0 or self.in_backward

    @property
    def params(self) -> list[FlatParam]:
        return [param for group in self.groups for param in group.params]

    def assemble(self, subclasses: Sequence[FlatSubclass]) -> None:
        """Put parameters together again that were taken apart; called once, when the groups are bound."""
        by_name = {param.name: param for param in self.params}
        for whole in subclasses:
            whole.bind(by_name)
        self._subclasses = list(subclasses)

    def check_parameters(self) -> None:
        """Raise if the modules hold other parameters than those that were given to them."""
        changed = [param.name for param in self._subclasses if not param.is_intact()]
        for group in self.groups:
            for param in group.params:
                if not param.is_intact() or param.sharded.requires_grad != group.plan.requires_grad:
                    changed.append(param.name)
        if changed:
            raise RuntimeError(
                f"{changed[0]} of {self.name} was exchanged, converted, rebound or (un)frozen after "
                "fully_shard, so the engine's buffers no longer hold it; change values in place (copy_, "
                "load_state_dict), and convert or freeze parameters before fully_shard"
            )

    @property
    def has_changed(self) -> bool:
        """Weights were written since the last :meth:`refresh`."""
        return any(group.weights.has_changed for group in self.groups)

    def refresh(self) -> bool:
        """Take up what was written to the weights; whether anything was."""
        changed = [group.weights.refresh() for group in self.groups]  # every group, not up to the first
        self.weights_epoch += any(changed)
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

    def evict(self) -> None:
        """The slot is about to be overwritten, or its content is out of date."""
        if self.slot is None:
            return
        if self.state is State.GATHERING:
            self._gathered.wait()
        if self.pinned:
            self.slot.free.record()
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

    def to_unsharded(self) -> None:
        for group in self.groups:
            for param in group.params:
                param.to_unsharded()
        for whole in self._subclasses:
            whole.to_unsharded()

    def to_sharded(self) -> None:
        for group in self.groups:
            for param in group.params:
                param.to_sharded()
        for whole in self._subclasses:
            whole.to_sharded()


def is_plain_embedding(module: nn.Module) -> bool:
    """An embedding's gradient needs indices only, unless its forward was wrapped to be run again."""
    return type(module) in (nn.Embedding, Embedding) and "forward" not in vars(module)
