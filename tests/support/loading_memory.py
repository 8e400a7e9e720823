"""What loading a folder allocates on a rank: tensors by torch's allocator, everything else by Python's."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.huggingface.transformers_api import build_hf_model
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from tests.support.allocations import count_allocations


class _Inline(Executor):
    """Does at once, in the thread whose allocations are counted, what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def held_by(model: nn.Module) -> int:
    """Bytes that the engine holds for good: this rank's shards of weights and gradients, and the slots."""
    engine = engine_of(model)
    tensors = [
        t
        for g in engine.groups
        for t in (g.weights.main, g.weights.shard, g.grad and g.grad.main)
        if t is not None
    ]
    shards = {t.data_ptr(): t.nbytes for t in tensors}
    return sum(shards.values()) + engine.plan.gather_slots.nbytes + engine.plan.grad_slots.nbytes


def load(folder: str) -> nn.Module:
    return parallelize(build_hf_model(folder), build_meshes(ep=dist.get_world_size()), load=folder)


def measure(folder: str) -> dict[str, int]:
    """Bytes of tensors at the peak of loading and at its end, those of other objects at their own peak, and
    what the engine holds."""
    load(f"{folder}/small")  # modules are imported, caches filled
    gc.collect()
    tracemalloc.start()
    try:
        with (
            mock.patch("fsdmoe.checkpoint.reader.ThreadPoolExecutor", _Inline),
            count_allocations() as tensors,
        ):
            model = load(f"{folder}/big")
            objects = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {"peak": tensors.peak, "end": tensors.end, "objects": objects, "held": held_by(model)}
