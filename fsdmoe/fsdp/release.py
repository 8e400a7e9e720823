"""Giving a model's device memory to somebody else for a while, and taking it back.

Between two steps a trainer may have to free memory, for example for generation on the same device. Every flat
buffer keeps its tensors and views and frees only the memory behind them, so nothing has to be bound again::

    released      main weights, gradients, moments     copied to the host, or dropped
                  weights in compute precision, slots  dropped: they are made again from main weights
    restored      the same addresses are not promised, the same values are

Meanwhile every use is refused by name: a tensor without memory would end the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import one_of
from fsdmoe.fsdp.buffer import BufferPool
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.fsdp.unit import Unit

Keep = Literal["host", "nothing"]
PROBLEM = "its memory was released; call engine_of(model).restore() first"


@dataclass
class _Held:
    """A buffer without memory."""

    buffer: torch.Tensor
    num_bytes: int
    """0 where its memory could not be taken."""
    copy: torch.Tensor | None
    """Its values in host memory."""


class ReleasedMemory:
    """What was taken from one model and its optimizers."""

    def __init__(
        self, units: list[Unit], pool: BufferPool, optimizers: Sequence[torch.optim.Optimizer], keep: Keep
    ) -> None:
        refuse(one_of("release", {"keep": keep}, {"keep": get_args(Keep)}))
        if pool.is_registered:  # giving it back over NCCL has not been seen to end
            raise ConfigError(
                "release: the buffers are registered with NCCL, which keeps their memory; set "
                "fsdp.register_buffers = false"
            )
        self._pool = pool
        self._device_type = pool.device.type
        if self._device_type == "cuda":
            torch.cuda.synchronize()  # whatever stream still uses the memory
        for unit in units:  # nothing gathered is worth keeping
            unit.let_go()
            unit.evict()
        self._shown = [*_shown_tensors(units), *_states(optimizers)]
        self._held: list[_Held] = []
        contents = [*_main_tensors(units), *(_piece(tensor) for tensor in self._shown)]
        seen: set[int] = set()
        for buffer in contents:
            self._take(buffer, seen, keep=keep == "host")
        for buffer in (*_derived_tensors(units), *_scratch(optimizers)):
            self._take(buffer, seen, keep=False)
        for tensor in self._shown:
            if isinstance(tensor, ShardedTensor):
                tensor.access.expired = PROBLEM
        self._pool.give_up()
        if self._device_type == "cuda":
            _empty_caches()

    @property
    def num_bytes(self) -> int:
        """How much device memory it is."""
        return sum(held.num_bytes for held in self._held)

    def _take(self, buffer: torch.Tensor, seen: set[int], *, keep: bool) -> None:
        storage = buffer.untyped_storage()
        if storage._cdata in seen or not storage.nbytes() or buffer.device.type != self._device_type:
            return  # taken already, or in the host memory of a device: nothing to gain
        seen.add(storage._cdata)
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage)
        copy = None
        if keep:
            copy = torch.empty_like(whole, device="cpu", pin_memory=buffer.is_cuda).copy_(whole)
        if not storage.resizable():  # host memory that numpy has seen (a checkpoint was written from it)
            self._held.append(_Held(whole, 0, copy))
            return
        self._held.append(_Held(whole, storage.nbytes(), copy))
        storage.resize_(0)

    def give_back(self) -> None:
        """Have the memory again: with the values it had, or zeros."""
        self._pool.resume((held.buffer, held.num_bytes) for held in self._held if held.num_bytes)
        for held in self._held:
            held.buffer.zero_() if held.copy is None else held.buffer.copy_(held.copy)
        self._held.clear()
        for tensor in self._shown:
            if isinstance(tensor, ShardedTensor):
                tensor.access.expired = None


def _empty_caches() -> None:
    """What torch keeps for later: freed memory, and a workspace of cuBLAS for every stream."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _groups(units: list[Unit]) -> Iterator[ParamGroup]:
    return (group for unit in units for group in unit.groups)


def _main_tensors(units: list[Unit]) -> Iterator[torch.Tensor]:
    """What nothing else could be made from."""
    for group in _groups(units):
        yield group.weights.main
        if group.grad is not None and group.grad.main is not None:
            yield group.grad.main


def _derived_tensors(units: list[Unit]) -> Iterator[torch.Tensor]:
    for group in _groups(units):
        yield from group.weights.derived()
        yield from group.context.scratch.tensors()
    for unit in units:
        for slot in (unit.slot, unit.grads.slot):
            if slot is not None:
                yield from slot.buffers.values()


def _shown_tensors(units: list[Unit]) -> Iterator[torch.Tensor]:
    """What users hold."""
    for group in _groups(units):
        for param in group.params:
            yield param.sharded
        for grad in group.param_grads:
            if (shown := grad.param.sharded.grad) is not None:
                yield shown


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _scratch(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """What an optimizer works in; asking for it waits until nothing does."""
    for optimizer in optimizers:
        yield from getattr(optimizer, "scratch_tensors", list)()


def _piece(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._piece if isinstance(tensor, ShardedTensor) else tensor
