"""Frozen weights that are stored as codes. They are opened one unit at a time, so at most one unit has
values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fsdmoe.fsdp.unit import Unit
from fsdmoe.fsdp.weights import WeightBuffer


@dataclass(frozen=True)
class CodedUnit:
    """What one unit keeps as codes."""

    tensors: dict[str, torch.Tensor]
    """Sharded parameters by name; they can be written while the unit is open."""
    weights: list[WeightBuffer]

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
            found.append(CodedUnit(tensors, [group.weights for group in groups]))
    return found
