"""Persistent buffers: allocated once, from memory that is registered with NCCL, and shared by units in turn.

On CUDA every buffer that a collective touches comes from one ``torch.cuda.MemPool`` that is registered with
every communicator, so that NCCL reads and writes it in place. What the hardware allows is found out in
steps::

    NCCL's own allocator (needs multicast)  ->  ordinary device memory in a pool  ->  no registration

and reported in :attr:`BufferPool.report`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


class Slot:
    """A buffer that several units use in turn, each at the same place every time."""

    def __init__(self, name: str, buffers: dict[torch.dtype, torch.Tensor], *, shared: bool) -> None:
        self.name = name
        self.buffers = buffers
        self.shared = shared
        """More than one unit uses it."""


class BufferPool:
    """Where flat buffers come from."""

    def __init__(
        self, device: torch.device, communicators: Iterable[dist.ProcessGroup], *, register: bool
    ) -> None:
        self.device = device
        self.report = "plain tensors: gloo needs no registration"
        self._communicators = list(communicators)
        self._pool: torch.cuda.MemPool | None = None
        self._registered: list[dist.ProcessGroup] = []
        """Communicators that know the pool's memory."""
        self._pooled: set[int] = set()
        """Storages that lie in the pool."""
        if device.type != "cuda":
            return
        self.report = "ordinary device memory, not registered"
        if not register:
            self.report += " (fsdp.register_buffers = false)"
        elif not self._communicators:
            self.report += " (no group spans more than one rank)"
        else:
            self._open_pool()

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """A flat buffer of zeros; on ``device`` instead of the pool's if given."""
        if device is not None and device != self.device:
            pinned = device.type == "cpu" and self.device.type == "cuda"
            return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned)
        if self._pool is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        with torch.cuda.use_mem_pool(self._pool):
            buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self._pooled.add(buffer.untyped_storage()._cdata)
        return buffer

    def register(self) -> None:
        """Register what was allocated with every communicator. Call once, after the last buffer."""
        if self._pool is None:
            return
        refused = self._register()
        total = len(self._communicators)
        self.report += f", registered with {len(self._registered)} of {total} communicators"
        if refused:
            self.report += f" (refused: {refused})"

    @property
    def is_registered(self) -> bool:
        """Some communicator knows the memory."""
        return bool(self._registered)

    def give_up(self) -> None:
        """Have the device take the pool's memory, which no communicator knows. No buffer has any by then."""
        self._pool = None  # a pool that is alive keeps its memory, whatever lies in it

    def resume(self, buffers: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Give ``buffers`` so many bytes each again, those of the pool in a new one."""
        if self._pooled:
            self._pool = self._make_pool()
        for buffer, num_bytes in buffers:
            storage = buffer.untyped_storage()
            pool = self._pool if storage._cdata in self._pooled else None
            with contextlib.nullcontext() if pool is None else torch.cuda.use_mem_pool(pool):
                storage.resize_(num_bytes)

    def _register(self) -> str:
        """With every communicator; why one would not, if one would not."""
        assert self._pool is not None
        refused = ""
        for group in self._communicators:
            try:
                _backend(group, self.device).register_mem_pool(self._pool)
                self._registered.append(group)
            except (RuntimeError, AttributeError) as error:
                refused = str(error).strip().splitlines()[0]
        if self._registered:
            keep_forever(self._pool)
        return refused

    def _open_pool(self) -> None:
        for group in self._communicators:  # a communicator exists only after its first collective
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._pool = self._make_pool()

    def _make_pool(self) -> torch.cuda.MemPool:
        try:
            pool = torch.cuda.MemPool(_backend(self._communicators[0], self.device).mem_allocator)
            self.report = "NCCL's allocator"
        except (RuntimeError, AttributeError):
            pool = torch.cuda.MemPool()
            self.report = "ordinary device memory in a pool"
        return pool


class Scratch:
    """Short-lived tensors of reductions, one buffer a use and dtype, valid until the reduce stream runs the
    next reduction; made on first use and kept."""

    def __init__(self, pool: BufferPool, numel: int) -> None:
        self._pool, self._numel = pool, numel
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __call__(self, use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if (use, dtype) not in self._buffers:
            self._buffers[use, dtype] = self._pool.zeros(numel, dtype)
        return self._buffers[use, dtype][:numel]

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return list(self._buffers.values())

    def slice(self, use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same for a rank's slice of a group: one buffer serves all groups."""
        return self(use, max(numel, self._numel), dtype)[:numel]


def keep_forever(anything: object) -> None:
    """Let an object outlive even the interpreter's end.

    A registered pool that is destroyed takes its memory back from its communicators. At the end of a program
    they are gone already, and NCCL ends the process with an abort."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(anything))


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """NCCL's own object behind a group; its registration calls are not part of the common interface."""
    return group._get_backend(device)
