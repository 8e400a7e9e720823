"""A copy of the state in host memory, so that training can go on while it is written.

Pieces of sharded tensors are views of a few flat buffers. They are copied as long runs of those buffers,
not one by one: the time is bytes over the bandwidth of the host link. Host buffers are pinned where the
state is on a GPU and are kept from save to save.
"""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass

import torch

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.host_memory import available_host_bytes
from fsdmoe.core.rules import size_text
from fsdmoe.fsdp.sharded_tensor import ShardedTensor

_JOIN_GAP_BYTES = 64 << 10
_ALIGNMENT = 256
_SPARE = 0.1


@dataclass(frozen=True)
class _StorageRange:
    """A range of one storage and where its copy begins in the host buffer."""

    storage: torch.UntypedStorage
    device: torch.device
    start: int
    end: int
    host: int


class Stager:
    """Copies tensors to host memory that it keeps and reuses; one copy at a time."""

    def __init__(self) -> None:
        self._host = torch.empty(0, dtype=torch.uint8)
        self._is_used = False

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return self._host.numel()

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the host memory now (pinning is slow), not in the first save."""
        self._reserve(_storage_ranges(tensors))

    def lack_of_memory(self, tensors: dict[str, torch.Tensor]) -> str | None:
        """Why a copy does not fit into the host's memory, with those of the host's other ranks; None if it
        does."""
        ranges = [run for runs in _storage_ranges(tensors).values() for run in runs]
        size, is_pinned = sum(run.end - run.start for run in ranges), self._host.is_pinned()
        if (self._is_used or is_pinned) and size <= self.num_bytes:
            return None  # it is there: other memory is taken from the system when it is first written
        if any(run.device.type == "cuda" for run in ranges):
            size = 1 << (size - 1).bit_length()  # so torch rounds pinned memory up
        needed = size * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = available_host_bytes()
        if needed <= available * (1 - _SPARE):
            return None
        return (
            f"a copy of the state takes {size_text(needed)} of host memory and "
            f"{size_text(available)} are available, of which a tenth is spared; use more hosts, or "
            "set checkpoint.asynchronous = false"
        )

    @torch.no_grad()
    def stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of all tensors; the originals may change as soon as this returns. Valid until the next
        call.
        """
        runs = _storage_ranges(tensors)
        self._reserve(runs)
        self._is_used = True
        for run in (run for found in runs.values() for run in found):
            source = torch.empty(0, dtype=torch.uint8, device=run.device).set_(run.storage)
            part = source[run.start : run.end]
            self._host[run.host : run.host + part.numel()].copy_(part, non_blocking=True)
        for device in {run.device for found in runs.values() for run in found if run.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._staged(tensor, runs) for name, tensor in tensors.items()}

    def _staged(self, tensor: torch.Tensor, runs: dict[int, list[_StorageRange]]) -> torch.Tensor:
        flat = _flat(tensor)
        if not flat.numel():
            copied = torch.empty_like(flat, device="cpu")
        else:
            start, end = _extent(flat)
            candidates = runs[flat.untyped_storage().data_ptr()]
            run = candidates[bisect.bisect_right(candidates, start, key=lambda r: r.start) - 1]
            at = run.host + start - run.start
            data = self._host[at : at + end - start].view(flat.dtype)
            copied = data.as_strided(flat.shape, flat.stride(), data.storage_offset())
        return tensor.with_piece(copied) if isinstance(tensor, ShardedTensor) else copied

    def _reserve(self, runs: dict[int, list[_StorageRange]]) -> None:
        everything = [run for found in runs.values() for run in found]
        need = max((run.host + run.end - run.start for run in everything), default=0)
        pinned = any(run.device.type == "cuda" for run in everything)
        if self._host.numel() < need or (pinned and not self._host.is_pinned()):
            self._host = torch.empty(0, dtype=torch.uint8)  # give the old one back first
            self._host = torch.empty(need, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _storage_ranges(tensors: dict[str, torch.Tensor]) -> dict[int, list[_StorageRange]]:
    """Everything the tensors touch, by storage, as few ranges in order; small gaps are copied along."""
    extents: dict[int, list[tuple[int, int]]] = {}
    storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
    for flat in map(_flat, tensors.values()):
        if flat.numel():
            key = flat.untyped_storage().data_ptr()
            extents.setdefault(key, []).append(_extent(flat))
            storages[key] = (flat.untyped_storage(), flat.device)
    runs: dict[int, list[_StorageRange]] = {}
    host = 0
    for key, found in extents.items():
        merged: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if merged and start <= merged[-1][1] + _JOIN_GAP_BYTES:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        for start, end in merged:
            host += (start - host) % _ALIGNMENT  # elements keep their alignment
            runs.setdefault(key, []).append(_StorageRange(*storages[key], start, end, host))
            host += end - start
    return runs


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor.piece
    if hasattr(tensor, "__create_write_items__"):  # a DTensor, say: its copy would need its mesh on the host
        raise CheckpointError(
            f"{type(tensor).__name__}s are saved in the foreground only; switch asynchronous off"
        )
    return tensor.detach()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a strided tensor in its storage."""
    first = tensor.storage_offset()
    last = first + sum((n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first) * tensor.element_size(), (int(last) + 1) * tensor.element_size()
