"""What a sharding engine itself does to memory: bytes its operations move, by operation, and storages it
allocates.

A dispatch mode watches every operation; those that run while one of the engine's own methods is on the stack
are its. The stubbed collectives are not counted: they stand for the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fsdp_world
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FSDMOE = {
    "fsdmoe.fsdp.engine.Engine": ("pre_forward", "post_forward", "_pre_backward", "_end_backward"),
    "fsdmoe.fsdp.param_grad.ParamGrad": ("_take_gradient", "claim", "stage"),
}
FSDP2 = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
        "pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward", "unshard",
        "wait_for_unshard", "reshard",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": (
        "_root_pre_forward", "_pre_forward", "_post_forward", "_pre_backward",
        "_root_post_backward_final_callback",
    ),
}  # fmt: skip


@dataclass
class Work:
    """Of one step."""

    bytes_moved: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    new_storages: int = 0
    allocations: int = 0
    """By the CUDA allocator's own count, while the engine was on the stack."""

    @property
    def total(self) -> int:
        return sum(self.bytes_moved.values())


class Watch(TorchDispatchMode):
    """Counts while ``active`` and inside the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.depth = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.depth and not fsdp_world.in_collective():
            self._count(function, args, kwargs or {}, result)
        return result

    def _count(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        schema = function._schema
        writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        name = str(function)
        if is_view or "empty" in name:
            return
        moved = 0
        given = set()
        if "all_gather_copy_in" in name:  # writes only this rank's slice of the buffer that it is given
            args = (args[0], *(t[: sum(x.numel() for x in args[0])] for t in args[1:2]), *args[2:])
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            given |= {t.untyped_storage()._cdata for t in tensors}
            # what is written is read too, unless it is simply overwritten
            overwritten = writes[index] and any(
                word in name for word in ("copy", "zero", "fill", "cat", "sum")
            )
            times = 1 if overwritten or not writes[index] else 2
            moved += times * sum(t.numel() * t.element_size() for t in tensors)
        fresh = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        fresh = [t for t in fresh if t.untyped_storage()._cdata not in given]
        moved += sum(t.numel() * t.element_size() for t in fresh)
        self.work.bytes_moved[name] += moved
        self.work.calls[name] += 1
        self.work.new_storages += len(fresh)


@contextmanager
def watching(watch: Watch, methods: dict[str, tuple[str, ...]]) -> Iterator[None]:
    """Choose the engine's methods for ``watch``. Enter before the model is wrapped: hooks keep what they were
    given."""
    undo: list[tuple[type, str, Callable[..., Any]]] = []
    for path, names in methods.items():
        module, _, owner = path.rpartition(".")
        cls = getattr(__import__(module, fromlist=[owner]), owner)
        for name in names:
            real = getattr(cls, name)
            undo.append((cls, name, real))
            setattr(cls, name, _inside(watch, real))
    try:
        yield
    finally:
        for cls, name, real in undo:
            setattr(cls, name, real)


def _inside(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        before = _num_allocations() if watch.depth == 0 else 0
        watch.depth += 1
        try:
            return real(*args, **kwargs)
        finally:
            watch.depth -= 1
            if watch.depth == 0:
                watch.work.allocations += _num_allocations() - before

    return method


def _num_allocations() -> int:
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0) if torch.cuda.is_available() else 0
