"""Moments that live in host memory, stepped on the device a chunk at a time.

::

    copy in    | 0 | 1 | 2 | 3 |           a chunk's moments travel to a staging buffer,
    update         | 0 | 1 | 2 | 3 |       are stepped there beside weights and gradients that never left,
    copy out           | 0 | 1 | 2 | 3 |   and travel back, each way on a stream of its own

A buffer serves the next chunk when its last one has left. The buffers are made once, for the largest chunk,
and kept. The norm of the gradient is known before the first update, so clipping is exact. Copies of the last
chunks go on while the next forward runs; whoever reads a moment waits for them
(:class:`fsdmoe.optim.stretches.HostGuard`).

On a CPU the same code copies at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsdmoe.kernels.block_floats import BlockFloats, Moment
from fsdmoe.optim.moments import CHUNK, NUM_BUFFERS, aligned
from fsdmoe.optim.stretches import Stretch, tensors_of


class _Lane:
    """A CUDA stream; on a CPU nothing, for there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, *events: torch.cuda.Event | None) -> Iterator[None]:
        """What is issued inside runs here, after ``events``."""
        if self._stream is None:
            yield
            return
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def finish(self) -> None:
        """The host waits for all that was issued."""
        if self._stream is not None:
            self._stream.synchronize()


class _Buffer:
    """Memory on the device for the moments of one chunk."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.free: torch.cuda.Event | None = None

    def take(self, moments: Sequence[Moment]) -> list[Moment]:
        """Places for moments like these, side by side."""
        at, taken = 0, []
        for moment in moments:
            places = []
            for tensor in tensors_of(moment):
                places.append(self.memory[at : at + tensor.nbytes].view(tensor.dtype))
                at += aligned(tensor.nbytes)
            taken.append(BlockFloats(*places) if isinstance(moment, BlockFloats) else places[0])
        return taken


class StateStream:
    """The staging buffers, and what moves through them."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """``num_bytes``: of one buffer, see :func:`fsdmoe.optim.moments.staging_bytes`."""
        self._device = device
        self._in, self._out = _Lane(device), _Lane(device)
        self._buffers = [_Buffer(num_bytes, device) for _ in range(NUM_BUFFERS)]
        self._arrived: torch.cuda.Event | None = None
        """All that was sent to the host in the last step is there."""

    def run(self, stretches: Sequence[Stretch], update: Callable[[Stretch], Any]) -> None:
        """``update`` every stretch, whose moments are in host memory, on the device."""
        chunks = [(s, slice(at, at + CHUNK)) for s in stretches for at in range(0, s.main.numel(), CHUNK)]
        for number, (stretch, part) in enumerate(chunks):
            buffer = self._buffers[number % NUM_BUFFERS]
            home = [stretch.exp_avg[part], stretch.exp_avg_sq[part]]
            staged = buffer.take(home)
            with self._in.after(buffer.free, self._arrived):
                _copy(home, staged)
            travelled = self._in.record()
            if travelled is not None:
                torch.cuda.current_stream(self._device).wait_event(travelled)
            update(stretch.part(part, *staged))
            done = None
            if self._device.type == "cuda":
                done = torch.cuda.current_stream(self._device).record_event()
            with self._out.after(done):
                _copy(staged, home)
            buffer.free = self._out.record()
        self._arrived = self._out.record()

    def finish(self) -> None:
        """Wait until the host has all moments."""
        self._out.finish()

    def tensors(self) -> list[torch.Tensor]:
        """The staging buffers; nothing uses them when this returns."""
        self.finish()
        return [buffer.memory for buffer in self._buffers]


def _copy(sources: Sequence[Moment], targets: Sequence[Moment]) -> None:
    for source, target in zip(sources, targets, strict=True):
        for tensor, into in zip(tensors_of(source), tensors_of(target), strict=True):
            into.copy_(tensor, non_blocking=True)
