"""An exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights`` after
each step, of the main weights, on the flat shards.

In bfloat16 it is rounded stochastically, by the place of each element in its parameter: the nearest number
would leave small changes out for ever, and other ranks would round otherwise. In host memory it is brought to
the device chunk by chunk for each update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdmoe.core.placement import Coordinates
from fsdmoe.fsdp.access import ReadGuard
from fsdmoe.fsdp.engine import engine_of
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.memory_plan import MomentBytes, MomentCount
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.plan import GroupPlan
from fsdmoe.memory.pinned import pinned_zeros
from fsdmoe.optim.ema_config import EMAConfig
from fsdmoe.optim.moments import CHUNK, place_of
from fsdmoe.precision.block_floats import ElementPlace, random_bits, round_stochastically
from fsdmoe.precision.config import torch_dtype


class _Averaged(NamedTuple):
    """This rank's part of a parameter."""

    group: ParamGroup
    param: FlatParam
    average: torch.Tensor
    place: ElementPlace | None

    @property
    def main(self) -> torch.Tensor:
        return self.group.owned_range(self.param).of(self.group.weights.main)


class _Arrived:
    """What was copied to host memory can be read there."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.wait = event.synchronize


class WeightAverage:
    """The average of a sharded model's trained weights.

    ::

        average = WeightAverage(model, EMAConfig(decay=0.999))
        ...
        optimizer.step()
        average.update()
        ...
        with average.applied():
            evaluate(model)
    """

    def __init__(self, model: nn.Module, config: EMAConfig) -> None:
        """Start from the weights as they are.

        Raises:
            ConfigError: The mesh would cut the blocks that bfloat16 is rounded in.
        """
        engine = engine_of(model)
        self.config = config
        self.is_loaded = False
        """It came with the checkpoint that was loaded last."""
        self._steps = 0
        self._guard = ReadGuard()
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._averaged: list[_Averaged] = []
        dtype = torch_dtype(config.dtype)
        is_rounded = config.dtype == "bfloat16"
        for group in engine.groups:
            main = group.weights.main
            for plan, param in zip(group.plan.params, group.params, strict=True):
                if not group.plan.requires_grad:
                    continue
                owned = group.owned_range(param)
                if config.memory == "host" and main.is_cuda:
                    average = pinned_zeros(owned.numel, dtype=dtype, device=main.device)
                else:
                    average = torch.zeros(owned.numel, dtype=dtype, device=main.device)
                place = place_of(plan, owned, engine.meshes) if is_rounded else None
                self._averaged.append(_Averaged(group, param, average, place))
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Begin anew, from the weights as they are."""
        self._steps = 0
        for each in self._averaged:
            each.group.weights.guard.wait()
            each.average.copy_(each.main)

    def follow_load(self) -> None:
        """The weights came from a checkpoint: begin anew from them where it has no average."""
        if not self.is_loaded:
            self.start()
        self.is_loaded = False

    @torch.no_grad()
    def update(self) -> None:
        """After the optimizer's step, on every rank."""
        self._steps += 1
        if self._steps % self.config.every:
            return
        weight = 1 - self.config.decay**self.config.every
        for each in self._averaged:
            each.group.weights.guard.wait()  # moments in host memory are stepped on another stream
            main = each.main
            step = torch.tensor(self._steps, device=main.device)
            for start in range(0, main.numel(), CHUNK):
                part = slice(start, start + CHUNK)
                place = None if each.place is None else each.place.after(start)
                _follow(each.average[part], main[part], weight, place, step)
        if self._averaged and self._averaged[0].main.is_cuda and self.config.memory == "host":
            self._guard.pending = _Arrived(torch.cuda.current_stream().record_event())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the average for its weights inside; its own are kept meanwhile, where the average
        is."""
        kept = []
        with torch.no_grad():
            for each in self._averaged:
                each.group.weights.guard.wait()
                kept.append(each.main.to(each.average.device, copy=True))
                each.main.copy_(each.average)
                each.group.weights.mark_changed()
        try:
            yield
        finally:
            with torch.no_grad():
                for each, own in zip(self._averaged, kept, strict=True):
                    each.main.copy_(own)
                    each.group.weights.mark_changed()

    # Checkpoints: by the names of the model's parameters, as sharded tensors that a load fills in place.

    is_optional = True
    """A checkpoint without it can be loaded: the average then starts from the weights."""

    def checkpoint_state(self) -> dict[str, Any]:
        tensors = {
            self._names[each.param.sharded]: each.param.sharded.with_piece(each.average, self._guard)  # type: ignore[attr-defined]
            for each in self._averaged
        }
        return {"tensors": tensors, "steps": self._steps}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Tensors were filled in place."""
        self.is_loaded = True
        self._steps = int(state.get("steps", 0))


def _follow(
    average: torch.Tensor, main: torch.Tensor, weight: float, place: ElementPlace | None, step: torch.Tensor
) -> None:
    fresh = average.to(main.device, torch.float32, non_blocking=True)
    fresh.lerp_(main.float(), weight)
    if place is not None:
        fresh = round_stochastically(fresh, random_bits(place, step, fresh.numel())[2])
    if fresh is not average:
        average.copy_(fresh, non_blocking=True)


def with_average(count: MomentCount, config: EMAConfig) -> MomentCount:
    """What an optimizer holds, and the average too: for plans."""

    def counted(groups: Sequence[GroupPlan], at: Coordinates) -> MomentBytes:
        found = count(groups, at)
        owned = (piece.numel for group in groups for piece in group.layout.owned(at.rank(group.axis)))
        held = sum(owned) * torch_dtype(config.dtype).itemsize
        if config.memory == "host":
            return replace(found, host=found.host + held)
        return replace(found, device=found.device + held)

    return counted
