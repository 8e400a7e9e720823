"""Statistics of quantised operands over the steps of a run: which steps are counted, and their figures.

A step begins with the first training forward after the end of the one before
(:meth:`QuantizedState.end_step`), or with other weights, in a loop that does not call it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.precision.operand_state import (
    LOWEST_EXPONENT,
    NUM_SHARES,
    ROLES,
    OperandState,
    OperandStatistics,
)

_ATTRIBUTE = "quantized_state"
Figures = dict[str, dict[str, dict[str, Any]]]
"""By projection and operand, over all ranks: ``amax``, shares ``underflow`` and ``overflow``, and how many
``scales`` there are of each power of two."""


class QuantizedState:
    """Of all covered projections of a model."""

    def __init__(self, states: list[OperandState], interval: int) -> None:
        """``interval``: every so many steps are counted."""
        self.states = states
        self._interval = interval
        self._num_steps = 0
        self._epoch = 0
        self._is_open = False
        """A step has begun, and has not ended yet."""
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")

    def follow(self, model: nn.Module, meshes: Meshes) -> None:
        """Be told by a sharded model when a step begins. On every rank."""
        self._group = meshes.group(Axis.WORLD)
        self._device = meshes.device
        engine = engine_of(model)

        def begin(*_: Any) -> None:
            self._begin_forward(engine)

        # After the engine's own hook, which takes up the weights of the step before.
        model.register_forward_pre_hook(torch._dynamo.disable(begin))
        setattr(model, _ATTRIBUTE, self)

    def _begin_forward(self, engine: Engine) -> None:
        """Of a micro-batch."""
        epoch = sum(unit.weights_epoch for unit in engine.units)
        # A step that was skipped left the weights as they were: the next one is another all the same.
        if not torch.is_grad_enabled() or (epoch == self._epoch and self._is_open):
            return
        self._epoch = epoch
        self._is_open = True
        self._num_steps += 1
        for state in self.states:
            state.collects = self._num_steps % self._interval == 0
            state.statistics = None

    def discard_step(self) -> None:
        """Drop what this step counted so far: it is run again. On every rank."""
        for state in self.states:
            state.statistics = None

    def end_step(self) -> Figures | None:
        """The statistics of a step that they were asked for of. On every rank. Waits for the device then."""
        self._is_open = False
        return self._figures()

    def _figures(self) -> Figures | None:
        if not any(state.collects for state in self.states):
            return None
        found = [state.statistics or OperandStatistics(self._device) for state in self.states]
        counts, amax = torch.stack([f.counts for f in found]), torch.stack([f.amax for f in found])
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        for state in self.states:
            state.collects, state.statistics = False, None
        return {
            state.name: _by_role(own_counts, own_amax)
            for state, own_counts, own_amax in zip(self.states, counts.cpu(), amax.cpu(), strict=True)
        }


def _by_role(counts: Tensor, amax: Tensor) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for role, row, largest in zip(ROLES, counts.tolist(), amax.tolist(), strict=True):
        (num_elements, num_lost, num_clipped), bins = row[:NUM_SHARES], row[NUM_SHARES:]
        if num_elements:
            found[role] = {
                "amax": largest,
                "underflow": num_lost / num_elements,
                "overflow": num_clipped / num_elements,
                "scales": {str(LOWEST_EXPONENT + i): count for i, count in enumerate(bins) if count},
            }
    return found


def state_of(model: nn.Module) -> QuantizedState | None:
    """What :meth:`QuantizedState.follow` left there."""
    return getattr(model, _ATTRIBUTE, None)
