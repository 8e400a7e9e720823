"""Debug mode: every weight that backward reads must still be in its slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from fsdmoe.fsdp.unit import State, Unit, WeightSlot

Packed = tuple[torch.Tensor, WeightSlot | None, Unit | None]


class SlotGuard:
    """Notes which unit's weights a saved tensor views, and refuses to return it once its slot has another
    tenant."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._slots = {
            buffer.untyped_storage().data_ptr(): unit.slot
            for unit in units
            if unit.slot is not None
            for buffer in unit.slot.buffers.values()
        }
        self._active: saved_tensors_hooks | None = None

    def enter(self) -> None:
        if self._active is None:
            self._active = saved_tensors_hooks(self._pack, _unpack)
            self._active.__enter__()

    def leave(self) -> None:
        if self._active is not None:
            self._active.__exit__()
            self._active = None

    def _pack(self, tensor: torch.Tensor) -> Packed:
        slot = self._slots.get(tensor.untyped_storage().data_ptr())
        return tensor, slot, None if slot is None else slot.tenant


def _unpack(packed: Packed) -> torch.Tensor:
    tensor, slot, unit = packed
    if slot is None or unit is None:
        return tensor
    if slot.tenant is not unit or unit.state is not State.READY:
        holder = "none" if slot.tenant is None else slot.tenant.name
        raise RuntimeError(
            f"backward reads a weight of {unit.name} in slot {slot.name}, whose tenant is {holder}: the "
            "unit was not gathered again before its backward"
        )
    return tensor
