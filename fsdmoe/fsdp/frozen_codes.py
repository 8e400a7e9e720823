"""Frozen weights that are stored as codes. They are opened one unit at a time, so at most one unit has
values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.unit import Unit
from fsdmoe.fsdp.weights import WeightBuffer
from fsdmoe.precision.formats import Scaling
from fsdmoe.precision.four_bit import FourBit


@dataclass(frozen=True)
class CodePlace:
    """Where this rank keeps codes of a parameter: for whoever has codes of the same format to write."""

    scaling: Scaling | FourBit
    shape: tuple[int, ...]
    """Of the local tensor."""
    low: tuple[int, ...]
    """Where it begins in the global one."""
    start: int
    """This rank holds its elements from ``start`` to ``end``."""
    end: int
    codes: torch.Tensor
    """Of these, flat."""
    scales: torch.Tensor
    """Of all blocks of the local tensor; in four bits the factors of this rank's blocks, flat."""


@dataclass(frozen=True)
class CodedUnit:
    """What one unit keeps as codes."""

    tensors: dict[str, torch.Tensor]
    """Sharded parameters by name; they can be written while the unit is open."""
    weights: list[WeightBuffer]
    places: dict[str, CodePlace]
    """Of the same parameters."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Values to write into; codes are made of them afterwards. Collective. What is raised inside leaves
        the codes as they were, so it must be raised on all ranks."""
        for buffer in self.weights:
            buffer.open()
        is_done = False
        try:
            yield
            is_done = True
        finally:
            for buffer in self.weights:
                buffer.close(encode=is_done)


def coded_units(units: Iterable[Unit]) -> list[CodedUnit]:
    """Those that keep anything as codes."""
    found = []
    for unit in units:
        groups = [group for group in unit.groups if group.plan.keeps_codes]
        if groups:
            tensors = {param.name: param.sharded.detach() for group in groups for param in group.params}
            places = {param.name: _place(group, param) for group in groups for param in group.params}
            found.append(CodedUnit(tensors, [group.weights for group in groups], places))
    return found


def _place(group: ParamGroup, param: FlatParam) -> CodePlace:
    held = group.owned_range(param)
    stored = group.plan.stored
    weights = group.weights
    assert weights.shard is not None
    codes = weights.shard[stored(held.offset) : stored(held.offset + held.numel)]
    if weights.four_bit is not None and group.plan.four_bit is not None:
        count = group.plan.four_bit.factor_numel
        scales = weights.four_bit.factors[count(held.offset) : count(held.offset + held.numel)]
    else:
        assert weights.scales is not None
        scales = weights.scales.scales[group.params.index(param)].scales
    plan = param.plan
    assert plan.scaling is not None
    low = plan.placement.boxes(group.context.meshes)[0].offsets
    return CodePlace(plan.scaling, plan.local_shape, low, held.start, held.end, codes, scales)
