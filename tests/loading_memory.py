"""Peak memory of loading: ``python -m tests.loading_memory FOLDER RANKS`` loads ``FOLDER/big``.

Resident memory says what is alive only if freed memory goes back to the system at once and nothing is rounded
up to huge pages. Allocators read such wishes when a process starts: the environment says
``MIMALLOC_PURGE_DELAY=0 MALLOC_MMAP_THRESHOLD_=131072`` (torch's allocator is mimalloc on some platforms,
glibc's on others).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.huggingface.transformers_api import build_hf_model
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel import parallelize

_NO_HUGE_PAGES, _RESET_PEAK = 41, "5"


def load(folder: str) -> nn.Module:
    return parallelize(build_hf_model(folder), build_meshes(ep=dist.get_world_size()), load=folder)


def held_by(model: nn.Module) -> int:
    """Bytes that the engine holds for good: this rank's shards of weights and gradients, and the slots."""
    engine = engine_of(model)
    tensors = [t for g in engine.groups for t in (g.main, g.shard, g.main_grad) if t is not None]
    shards = {t.data_ptr(): t.nbytes for t in tensors}
    return sum(shards.values()) + engine.plan.gather_slots.nbytes + engine.plan.grad_slots.nbytes


def resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(folder: str, rank: int, world: int) -> dict[str, int]:
    """Bytes by which the peak of loading, and its end, exceed the memory before; and what they should be."""
    ctypes.CDLL(None).prctl(_NO_HUGE_PAGES, 1, 0, 0, 0)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    load(f"{folder}/small")  # modules, thread pools and communicators are there now
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = resident("VmRSS")
    model = load(f"{folder}/big")
    found = {"peak": resident("VmHWM") - before, "end": resident("VmRSS") - before, "held": held_by(model)}
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    folder, world = sys.argv[1], int(sys.argv[2])
    build_hf_model(f"{folder}/small")  # imports once for all ranks, which are forks of this process
    with multiprocessing.get_context("fork").Pool(world) as pool:
        print(json.dumps(pool.starmap(measure, [(folder, r, world) for r in range(world)], chunksize=1)))
