"""The state of a recipe over the steps of a run: delayed scales are rolled, statistics read.

At the end of a step (:meth:`QuantizedState.end_step`; in a loop that does not call it, at the first training
forward with other weights)::

    roll     one all-reduce, the maximum over all ranks of what every covered projection saw in the step, for
             all layers together; it becomes the newest of each history

so scales are equal on all ranks, and those of a step stay the same through its micro-batches, its
recomputation and its backward. What is not finite is not rolled, and neither is what was not seen (an expert
layer without rows) or was all zero (gradients below an output projection that starts with zeros): their
histories stay as they are, and a scale that was not known before is not known yet. Where the scale of the
loss changes (float16), histories of gradients change with it: the next ones are as much larger.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.formats import Scaling
from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.fsdp.loss_scaling import LossScaling
from fsdmoe.kernels.operand_state import (
    LOWEST_EXPONENT,
    NUM_DELAYED,
    NUM_SHARES,
    ROLES,
    OperandState,
    OperandStatistics,
    delayed_scales,
)
from fsdmoe.mesh import Axis, Meshes

_ATTRIBUTE = "quantized_state"
Figures = dict[str, dict[str, dict[str, Any]]]
"""By projection and operand, over all ranks: ``amax``, shares ``underflow`` and ``overflow``, and how many
``scales`` there are of each power of two."""


class QuantizedState:
    """Of all covered projections of a model."""

    def __init__(self, states: list[OperandState], *, statistics_interval: int = 0) -> None:
        self.states = states
        self._interval = statistics_interval
        self._num_steps = self._epoch = 0
        self._is_open = False
        """A step has begun, and was not rolled yet."""
        self._prepared_versions: tuple[int, ...] = ()
        """Of the histories that delayed scales were last made of."""
        self._group: dist.ProcessGroup | None = None
        self._scaling: LossScaling | None = None
        self._device = torch.device("cpu")

    def follow(self, model: nn.Module, meshes: Meshes) -> None:
        """Be told by a sharded model when a step begins. On every rank."""
        self._group, self._device = meshes.group(Axis.WORLD), meshes.device
        engine = engine_of(model)
        self._scaling = engine.scaling

        def begin(*_: Any) -> None:
            self.begin_forward(engine)

        for state in self.states:
            state.prepared = {}
        # After the engine's own hook, which takes up the weights of the step before.
        model.register_forward_pre_hook(torch._dynamo.disable(begin))
        setattr(model, _ATTRIBUTE, self)

    def begin_forward(self, engine: Engine) -> None:
        """Of a micro-batch; before a graph stands for it, which must not contain what is done once a step."""
        epoch = sum(unit.weights_epoch for unit in engine.units)
        # A step that was skipped left the weights as they were: the next one is another all the same.
        if torch.is_grad_enabled() and not (epoch == self._epoch and self._is_open):
            self._roll()
            self._epoch, self._is_open = epoch, True
            self._num_steps += 1
            for state in self.states:
                state.collects = self._interval > 0 and self._num_steps % self._interval == 0
                state.statistics = None
        self._prepare()

    def discard_step(self) -> None:
        """Drop what this step saw so far: it is run again. On every rank."""
        for state in self.states:
            state.discard()
            state.statistics = None

    def end_step(self) -> Figures | None:
        """Take up what the step saw; its statistics, if they were asked for. On every rank. Waits for the
        device with statistics, and as long as an operand that was seen has been all zero or not finite."""
        self._roll()
        return self._figures()

    @torch.no_grad()
    def _roll(self) -> None:
        states = [state for state in self.states if state.is_delayed]
        if not self._is_open or not states:
            return
        self._is_open = False  # known to the host of every rank alike: the message below is for all of them
        zeros = torch.zeros(NUM_DELAYED, device=self._device)
        seen = torch.stack([zeros if state.amax is None else state.amax for state in states])
        seen = seen.nan_to_num(nan=torch.inf, posinf=torch.inf)  # of which the maximum is the same everywhere
        if self._group is not None:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._group)
        histories = [state.history for state in states]
        before = torch.stack(histories)
        after = torch.cat((seen.unsqueeze(-1), before[..., :-1]), dim=-1)
        taken = (seen.isfinite() & (seen > 0)).unsqueeze(-1)
        rolled = torch.where(taken, after, before)
        if self._scaling is not None and (growth := self._scaling.take_growth()) != 1:
            rolled[:, ROLES.index("grad")] *= growth
        torch._foreach_copy_(histories, list(rolled.unbind()))
        new = [state.noted - state.known for state in states]
        # Asked of the device until it was there once: kernels go by it without another look at the history.
        if any(new):
            for state, roles, row in zip(states, new, taken.squeeze(-1).tolist(), strict=True):
                state.known |= {role for role in roles if row[ROLES.index(role)]}
        for state in states:
            state.noted.clear()
        if places := [state.amax for state in states if state.amax is not None]:
            torch._foreach_zero_(places)

    @torch.no_grad()
    def _prepare(self) -> None:
        """Delayed scales of this step, as far as they were asked for before, by a few kernels for all."""
        # Whoever wrote them: a roll, or a checkpoint that was read between two steps.
        versions = tuple(state.history._version for state in self.states if state.prepared)
        if versions == self._prepared_versions:
            return
        self._prepared_versions = versions
        by_scaling: dict[Scaling, list[tuple[Tensor, Tensor]]] = {}
        for state in self.states:
            for (role, scaling), place in (state.prepared or {}).items():
                row = state.history[ROLES.index(role)]
                by_scaling.setdefault(scaling, []).append((row, place))
        for scaling, entries in by_scaling.items():
            rows, places = zip(*entries, strict=True)
            scales = delayed_scales(torch.stack(rows).amax(-1), scaling)
            torch._foreach_copy_(list(places), list(scales.view(-1, 1, 1).unbind()))

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
