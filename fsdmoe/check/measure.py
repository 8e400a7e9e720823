"""The numbers of a self-check: what this rank is, how fast it computes and copies, and how fast its groups
and links are. All functions that exchange something are collective."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from fsdmoe.core import compat
from fsdmoe.mesh import Axis, Meshes

_TRIES = 5
_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
_GEMM = {"cuda": 8192, "cpu": 512}


def versions(device_type: str) -> dict[str, str]:
    """Of what ranks must have in common; packages of models are compared when meshes are built."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = torch.cuda.get_device_name()
    return found


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def time_of_day() -> float:
    """Read by all ranks at one moment, as exactly as a barrier is."""
    dist.barrier()
    return time.time()


def gemm_rate(device: torch.device) -> float:
    """TFLOP/s of a square product, the best of a few."""
    n = _GEMM[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b), device) / 1e12


def copy_rate(device: torch.device) -> float:
    """GB/s read and written by a copy within a device's memory, the best of a few."""
    source = torch.empty(4 * _BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device) / 1e9


def group_latency(meshes: Meshes, axis: Axis) -> float:
    """Microseconds of a small all-reduce over this rank's group of an axis."""
    small = torch.zeros(1, device=meshes.device)
    return 1e6 * _best_seconds(partial(dist.all_reduce, small, group=meshes.group(axis)), meshes.device)


def group_rate(meshes: Meshes, axis: Axis) -> float:
    """GB/s of a gather over the same group (bytes that a rank receives)."""
    device, size = meshes.device, meshes.size(axis)
    own = torch.empty(_BYTES[device.type] // size, dtype=torch.uint8, device=device)
    whole = torch.empty(own.numel() * size, dtype=torch.uint8, device=device)
    seconds = _best_seconds(partial(compat.all_gather, whole, own, meshes.group(axis)), device)
    return (whole.numel() - own.numel()) / seconds / 1e9


def link_rate(meshes: Meshes) -> float:
    """GB/s of the better of two exchanges, with the rank before and the rank after this one on a ring that
    goes from machine to machine. A slow machine is slow in both, its neighbours in one."""
    world = dist.get_world_size()
    first: dict[int, int] = {}
    for rank in range(world):
        first.setdefault(meshes.node_of(rank), rank)
    ring = sorted(range(world), key=lambda rank: (rank - first[meshes.node_of(rank)], rank))
    at = ring.index(dist.get_rank())
    device = meshes.device
    data = torch.empty(_BYTES[device.type], dtype=torch.uint8, device=device)
    best = 0.0
    for shift in (0, 1):
        other = ((at + shift) ^ 1) - shift
        if shift and world % 2 == 0:
            other %= world
        if 0 <= other < world and other != at:
            seconds = _best_seconds(partial(_exchange, data, ring[other]), device)
            best = max(best, data.numel() / seconds / 1e9)
    return best


def _exchange(data: torch.Tensor, peer: int) -> None:
    arrived = torch.empty_like(data)
    ops = [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, arrived, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _best_seconds(act: Callable[[], object], device: torch.device) -> float:
    """Of a few tries after one to warm up: what disturbs a try makes it longer, never shorter."""
    found = []
    for _ in range(_TRIES + 1):
        _wait_for(device)
        began = time.perf_counter()
        act()
        _wait_for(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
