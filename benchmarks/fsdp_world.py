"""One rank of a world that does not exist: a fake process group, and collectives that move what one rank
would see.

The same stub serves every contender. A gather copies the local shard into every slot of the gathered buffer,
so the memory traffic of a received gather is real; a reduce-scatter takes this rank's slice. There is no
network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.mesh import Degrees, MeshConfig, Meshes, resolve_degrees

_depth = 0


def in_collective() -> bool:
    """A stub is at work: what it copies stands for the network."""
    return _depth > 0


class Done:
    """A handle of a collective that is over when the call returns."""

    def wait(self, *_: Any) -> bool:
        return True


def _stub(copy: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[..., Done | None]:
    """``copy(out, given)`` under any of the names and signatures that torch.distributed has for it."""

    def call(*args: Any, async_op: bool = False, **names: Any) -> Done | None:
        global _depth
        tensors = [t for t in (*args, *names.values()) if isinstance(t, torch.Tensor)]
        if not args:  # by name: output comes first whatever the order
            tensors.sort(key=lambda t: not any(t is v for k, v in names.items() if k.startswith("out")))
        _depth += 1
        try:
            copy(tensors[0], tensors[-1])
        finally:
            _depth -= 1
        return Done() if async_op else None

    return call


def _gather(out: torch.Tensor, own: torch.Tensor) -> None:
    slots, flat = out.view(-1, own.numel()), own.reshape(-1)
    first = 1 if slots[0].data_ptr() == flat.data_ptr() else 0  # rank 0 gathers in place
    if slots.shape[0] > first:
        slots[first:].copy_(flat)


def _scatter(out: torch.Tensor, full: torch.Tensor) -> None:
    out.view(-1).copy_(full.reshape(-1)[: out.numel()])


def _exchange(out: torch.Tensor, full: torch.Tensor) -> None:
    """What is sent comes back; a rank may receive more or less than it sends."""
    common = min(out.numel(), full.numel())
    out.view(-1)[:common].copy_(full.reshape(-1)[:common])
    out.view(-1)[common:].zero_()


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Done | None:
    """Nothing but for the largest of magnitudes (scales of quantised weights): what only other ranks know is
    zero here, and becomes the largest that this one knows. Weights of zeros would cost less power."""
    if op == dist.ReduceOp.MAX and tensor.is_floating_point():
        tensor.copy_(torch.where(tensor == 0, tensor.amax(), tensor))
    return Done() if async_op else None


STUBS = {
    "all_gather_into_tensor": _stub(_gather),
    "all_gather_single": _stub(_gather),
    "reduce_scatter_tensor": _stub(_scatter),
    "reduce_scatter_single": _stub(_scatter),
    "all_to_all_single": _stub(_exchange),
    "all_reduce": _all_reduce,
}


@contextmanager
def emulated_world(size: int) -> Iterator[None]:
    """This process is rank 0 of ``size`` ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    real = {name: getattr(dist, name) for name in STUBS if hasattr(dist, name)}
    for name in real:
        setattr(dist, name, STUBS[name])
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
        dist.destroy_process_group()


def emulated_meshes(size: int, ep: int, device_type: str) -> Meshes:
    degrees: Degrees = resolve_degrees(MeshConfig(ep=ep), size)
    return Meshes(degrees, device_type)
