"""Debug mode: every weight that backward reads must still be in its slot, and gradients that every rank of
``tp`` is said to have whole must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdmoe.fsdp.grads import GradBuffer
from fsdmoe.fsdp.unit import State, Unit, WeightSlot

_MAX_SPREAD = 0.02
"""Of gradients that are the same but for rounding, in parts of the largest element."""

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
        held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if is_traceable_wrapper_subclass(held):  # a collective's result on its way, say: it is no weight
            return tensor, None, None
        slot = self._slots.get(held.untyped_storage().data_ptr())
        return tensor, slot, None if slot is None else slot.tenant


def check_whole_gradients(grads: GradBuffer, tp: dist.ProcessGroup) -> None:
    """Compare the ranks' gradients of plain parameters in a model that DTensors split; see
    :mod:`fsdmoe.fsdp.dtensor`. Collective."""
    for param in grads.param_grads:
        if param.param.plan.grad_share == 1:
            continue
        assert param.view is not None
        low = param.view.clone() if param.written else torch.zeros_like(param.view)
        high = low.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=tp)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=tp)
        if (high - low).max() > _MAX_SPREAD * torch.maximum(high.abs(), low.abs()).max():
            raise RuntimeError(
                f"the gradient of {param.name} differs among the ranks of tp. It is a plain parameter of a "
                "model that DTensors split, so it was taken to work on the same tokens on all of them; where "
                "it works on a rank's own tokens or heads, make it a DTensor: parallelize its module with "
                "SequenceParallel, or distribute_tensor(parameter, mesh, [Replicate()])"
            )


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
