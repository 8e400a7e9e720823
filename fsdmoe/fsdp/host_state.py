"""What the host knows of a sharded model between two micro-batches: the part that a CUDA graph cannot replay.

A graph repeats what the device did in one micro-batch: gathers, kernels, reductions. The host chose them by
its state: whose weights are in which slot, which gradients are overwritten and which are added to. Launching
them changed that state. So a graph stands for a pair of states::

    settle(engine)                       weights are taken up, nothing is under way
    before = HostState.of(engine)        hashable: a graph is good for the state that it was captured in
    prepare_gradients(engine)            what users kept of earlier gradients is theirs
    capture, between open_capture and close_capture
    after = HostState.of(engine)

    settle(engine)                       later, if HostState.of(engine) == before
    prepare_gradients(engine)
    graph.replay()
    after.restore(engine)                the engine goes on as if it had issued all of it
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fsdmoe.fsdp.engine import Engine
from fsdmoe.fsdp.grads import GradSnapshot, GradState
from fsdmoe.fsdp.unit import State


@dataclass(frozen=True)
class HostState:
    """Of all units, in their order."""

    weights: tuple[State, ...]
    grads: tuple[GradSnapshot, ...]

    @classmethod
    def of(cls, engine: Engine) -> HostState:
        units = engine.units
        return cls(tuple(unit.state for unit in units), tuple(unit.grads.snapshot() for unit in units))

    @property
    def is_at_rest(self) -> bool:
        """No backward is missing or broken: a micro-batch that starts here can be captured."""
        at_rest = (GradState.EMPTY, GradState.OPEN, GradState.PARTIAL, GradState.FINAL)
        return all(grad.state in at_rest and not grad.is_staged for grad in self.grads)

    @property
    def is_first(self) -> bool:
        """There is no gradient yet."""
        return all(grad.state is GradState.EMPTY for grad in self.grads)

    def restore(self, engine: Engine) -> None:
        """A graph was replayed whose capture ended in this state."""
        for unit, state, grad in zip(engine.units, self.weights, self.grads, strict=True):
            unit.restore(state)
            unit.grads.restore(grad)


def settle(engine: Engine) -> None:
    """Between two micro-batches: take up what was written to weights and gradients, and leave nothing under
    way. Collective, as a forward is."""
    engine.begin_forward()
    for unit in engine.units:
        unit.let_go()
        if unit.state is State.GATHERING:
            unit.make_ready()
        unit.grads.take_user_changes()


def drop_gathered(engine: Engine) -> None:
    """Gather everything again: what other calls of the model (an evaluation) left gathered is no longer part
    of the state."""
    for unit in engine.units:
        unit.evict()


def prepare_gradients(engine: Engine) -> None:
    """Before a capture or a replay: have main gradients that may be written."""
    for unit in engine.units:
        unit.grads.prepare_replay()


def open_capture(engine: Engine) -> None:
    """At the start of a capture: the comm streams take part, and nothing waits for events from before."""
    engine.streams.gather.follow()
    engine.streams.reduce.follow()
    for unit in engine.units:
        if unit.slot is not None:
            unit.slot.free.record()


def close_capture(engine: Engine) -> None:
    """At its end: every stream that takes part is joined."""
    for unit in engine.units:
        if unit.state is State.GATHERING:
            unit.make_ready()
    engine.streams.gather.drain()
    engine.streams.reduce.drain()


def buffers_of(engine: Engine) -> list[Tensor]:
    """All tensors of the engine whose addresses a graph holds."""
    found: list[Tensor | None] = []
    for group in engine.groups:
        found += group.weights.read_in_steps()
        if group.grad is not None:
            found += [group.grad.main, group.grad.full]
    for unit in engine.units:
        for slot in (unit.slot, unit.grads.slot):
            found += [] if slot is None else slot.buffers.values()
    return [tensor for tensor in found if tensor is not None]
