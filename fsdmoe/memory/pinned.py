"""Pinned host memory near the device, if the machine says where that is, in blocks that are used again.

It is registered with CUDA directly, because torch's pinned allocator rounds sizes up to powers of two. Sizes
that vary by a few percent from step to step (rows that experts receive) reuse the same block.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdmoe.core.rules import numbers_in

_PAGE = 4096
_LARGE_PAGE = 1 << 21
_STEPS = 8
"""Sizes between two powers of two: a block is at most an eighth larger than what asked for it first."""


@dataclass(eq=False)
class PinnedBlock:
    """Host memory of one stored tensor."""

    bytes: Tensor
    event: torch.cuda.Event | None = None
    """The last copy that read or wrote it."""


class PinnedPool:
    """Blocks of one rank."""

    def __init__(self, *, limit: int | None = None, device: torch.device | None = None) -> None:
        """``limit`` in bytes; ``device``: whose copies go here."""
        self._limit = limit
        self._cpus = cpus_near(device)
        self._free: list[PinnedBlock] = []
        self.nbytes = 0
        """All that was ever taken from the host."""
        self.num_blocks = 0

    @property
    def is_near(self) -> bool:
        """Whether blocks are on the memory node of the device, as far as the machine says."""
        return self._cpus is not None

    def take(self, nbytes: int, *, pinned: bool) -> PinnedBlock | None:
        """A block of at least so many bytes; None where the limit does not allow a new one."""
        size = round_up(nbytes)
        fits = [block for block in self._free if nbytes <= block.bytes.numel() <= 2 * size]
        if fits:
            block = min(fits, key=lambda block: block.bytes.numel())
            self._free.remove(block)
            return block
        if self._limit is not None and self.nbytes + size > self._limit:
            return None
        block = PinnedBlock(host_bytes(size, self._cpus, pinned=pinned))
        self.nbytes += size
        self.num_blocks += 1
        return block

    def give_back(self, block: PinnedBlock) -> None:
        self._free.append(block)


def round_up(nbytes: int) -> int:
    """To one of eight sizes between powers of two, and to whole pages."""
    step = max(_PAGE, (1 << max(nbytes - 1, 1).bit_length() - 1) // _STEPS)
    return -(-nbytes // step) * step


def pinned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in page-locked host memory near ``device``, of exactly this size."""
    if not numel:
        return torch.zeros(0, dtype=dtype)
    return host_bytes(numel * dtype.itemsize, cpus_near(device), pinned=True).view(dtype)


def host_bytes(nbytes: int, cpus: frozenset[int] | None, *, pinned: bool, large_pages: bool = True) -> Tensor:
    """Zeros, in large pages where the system has them; page-locked as long as any tensor views them."""
    area = mmap.mmap(-1, nbytes + _LARGE_PAGE)  # of what is never touched nothing is taken
    whole = np.frombuffer(area, dtype=np.uint8)
    start = -whole.ctypes.data % _LARGE_PAGE
    if large_pages and nbytes >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            area.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _LARGE_PAGE * _LARGE_PAGE)
    held = whole[start : start + nbytes]
    if pinned:
        with running_on(cpus):  # a page is on the node of the core that touches it first: now
            _register(held)
    return torch.from_numpy(held)


def _register(held: np.ndarray) -> None:
    """Page-lock it as long as it lives."""
    address = held.ctypes.data
    code = int(torch.cuda.cudart().cudaHostRegister(address, held.nbytes, 0))
    if code != 0:
        raise RuntimeError(
            f"{held.nbytes / 2**20:.0f} MiB of host memory cannot be page-locked (CUDA error {code}); raise "
            "the limit of locked memory (ulimit -l), or lower memory.offload_limit_gib or optim.state_offload"
        )
    weakref.finalize(held, _unregister, address).atexit = False  # the driver is gone by then


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # copies may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)


def cpus_near(device: torch.device | None) -> frozenset[int] | None:
    """The cores of the device's memory node, of those that this process may use; None where the machine does
    not say, or has one node only."""
    if device is None or device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        cores = numbers_in(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip())
        usable = cores & os.sched_getaffinity(0)
        return frozenset(usable) or None
    return None


@contextlib.contextmanager
def running_on(cpus: frozenset[int] | None) -> Iterator[None]:
    """This thread on these cores, for a while."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
