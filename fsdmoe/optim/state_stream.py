"""Moments that live in host memory, stepped on the device a chunk at a time, during forward and backward.

::

    copy in    | 0 | 1 | 2 | 3 | 4 |               a chunk's moments are copied to a ring buffer,
    update             | 0 | 1 | 2 | 3 | 4 |       are stepped there with weights and gradients that never
    copy out               | 0 | 1 | 2 | 3 | 4 |   left, and are copied back; each on its own stream
               backward | forward of the next step

The norm of the gradient is known before the first update, so clipping is exact. No step waits for
all of it: the ring is filled before the gradients are complete, and a layer's forward waits only for the
update of its own weights (:class:`fsdmoe.fsdp.access.ReadGuard`), while later layers are updated.

With R bytes of ring, M bytes of moments in host memory, a link of B bytes/s each way and W seconds from the
gradient's norm to the head of the next forward, nothing is exposed if M - R <= B W and M <= B T for a whole
step of T seconds: what does not fit into the ring crosses the link between the norm and the layer that needs
it. So at full speed at most B W bytes of device memory are saved, however large M is: it is the price of
knowing the norm first.

On a CPU the same code copies at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.optim.moments import CHUNK, aligned
from fsdmoe.optim.torchao_moments import TorchaoMoment
from fsdmoe.optim.update_ranges import UpdateRange, tensors_of
from fsdmoe.precision.block_floats import BlockFloats, Moment

Event = torch.cuda.Event | None
Update = Callable[[UpdateRange], None]


class MomentChunk(NamedTuple):
    """A part of an update range, stepped by ``update``."""

    update_range: UpdateRange
    part: slice
    update: Update

    @property
    def key(self) -> tuple[ParamGroup, int, int]:
        return self.update_range.group, self.update_range.indices[0], self.part.start

    @property
    def home(self) -> list[Moment]:
        """Its moments in host memory."""
        first = self.update_range.exp_avg
        second = self.update_range.exp_avg_sq
        assert not isinstance(first, TorchaoMoment)  # refused with moments in host memory
        assert not isinstance(second, TorchaoMoment)
        return [first[self.part], second[self.part]]


@dataclass
class _Staged:
    """A chunk's moments on the device."""

    start: int
    end: int
    moments: list[Moment]
    arrived: Event
    left: Event = None
    """They are in host memory again, and their place is free."""


class _Lane:
    """A CUDA stream; on a CPU nothing, for there is nothing to wait for."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, *events: Event) -> Iterator[None]:
        """What is issued inside runs here, after ``events``."""
        if self._stream is None:
            yield
            return
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def take(self, memory: torch.Tensor) -> None:
        """From now on this stream uses ``memory``, which is the current stream's: behind what that still does
        with it, and its block is not given out again before this stream is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(memory.device))
            memory.record_stream(self._stream)

    def record(self) -> Event:
        return None if self._stream is None else self._stream.record_event()

    def finish(self) -> None:
        """The host waits for all that was issued."""
        if self._stream is not None:
            self._stream.synchronize()


class StateStream:
    """Three streams and a ring of device memory that is made once."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # Updates are short and layers' kernels long: one that waits for every processor would hold up copies.
        self._in, self._update, self._out = _Lane(device), _Lane(device, priority=-1), _Lane(device)
        for lane in (self._in, self._update, self._out):
            lane.take(self._memory)
        self._tenants: deque[_Staged] = deque()
        """Whose places may still be in use, in the order of the ring."""
        self._head = 0
        self._ahead: dict[tuple[ParamGroup, int, int], _Staged] = {}
        """Chunks of the next step that are here or on their way."""
        self._home: dict[tuple[ParamGroup, int, int], Event] = {}
        """When the last step's moments of a chunk are in host memory again."""
        self._updated: Event = None
        """All updates are done."""
        self._held: object = None
        """What updates under way read and nobody else may hold."""

    def run(
        self, work: Sequence[tuple[UpdateRange, Update]], ready: Event = None, held: object = None
    ) -> dict[ParamGroup, Event]:
        """Update every range, whose moments are in host memory, on the device, from ``ready`` on; in the
        order in which weights are needed. ``held`` is kept while updates may read it. Returns when each group
        is done: until then nobody may read its weights or write its gradients."""
        chunks = [
            MomentChunk(update_range, slice(at, at + CHUNK), update)
            for update_range, update in work
            for at in range(0, update_range.main.numel(), CHUNK)
        ]
        if list(self._ahead) != [chunk.key for chunk in chunks[: len(self._ahead)]]:
            self.discard()  # other parameters have gradients than in the last step
        if self._updated is not None:
            self._updated.wait()  # else a second step without a forward would let go of what is held
        done: dict[ParamGroup, Event] = {}
        for chunk in chunks:
            staged = self._ahead.pop(chunk.key, None) or self._fetch(chunk)
            with self._update.after(ready, staged.arrived):
                chunk.update(chunk.update_range.part(chunk.part, *staged.moments))
            done[chunk.update_range.group] = self._updated = self._update.record()
            with self._out.after(self._updated):
                _copy(staged.moments, chunk.home)
            staged.left = self._home[chunk.key] = self._out.record()
        self._held = held
        for chunk in chunks:
            if not self._has_place(chunk):
                break
            self._ahead[chunk.key] = self._fetch(chunk)
        return done

    def _fetch(self, chunk: MomentChunk) -> _Staged:
        """Have a chunk's moments come."""
        home = chunk.home
        start, end = self._next_place(_num_bytes(home))
        leaving = []
        while self._tenants and self._overlaps(start, end):
            leaving.append(self._tenants.popleft().left)
        moments = _views(self._memory[start:end], home)
        with self._in.after(self._home.pop(chunk.key, None), *leaving):
            _copy(home, moments)
        staged = _Staged(start, end, moments, self._in.record())
        self._tenants.append(staged)
        self._head = end
        return staged

    def _next_place(self, num_bytes: int) -> tuple[int, int]:
        start = self._head if self._head + num_bytes <= self._memory.numel() else 0
        return start, start + num_bytes

    def _overlaps(self, start: int, end: int) -> bool:
        """The oldest tenant lies there, or between the head and there."""
        oldest = self._tenants[0]
        if start < self._head:  # it goes round
            return oldest.start >= self._head or oldest.start < end
        return self._head <= oldest.start < end

    def _has_place(self, chunk: MomentChunk) -> bool:
        """Without the place of another chunk of the next step."""
        start, end = self._next_place(_num_bytes(chunk.home))
        if not self._ahead:
            return True
        first = next(iter(self._ahead.values())).start
        if first < self._head:
            return start >= self._head or end <= first
        return self._head <= start and end <= first

    def discard(self) -> None:
        """Drop what came ahead of its step: it is to come again."""
        if self._ahead:
            self._in.finish()
            for staged in self._ahead.values():
                staged.left = staged.arrived
            self._ahead.clear()

    def finish(self) -> None:
        """Wait until the host has all moments, and have nothing ahead: they may be written."""
        self._out.finish()
        self.discard()

    def tensors(self) -> list[torch.Tensor]:
        """The ring; nothing uses it when this returns."""
        self._update.finish()
        self.finish()
        return [self._memory]


def _num_bytes(moments: Sequence[Moment]) -> int:
    return sum(aligned(tensor.nbytes) for moment in moments for tensor in tensors_of(moment))


def _views(memory: torch.Tensor, moments: Sequence[Moment]) -> list[Moment]:
    """Places for moments like these, side by side."""
    at, taken = 0, []
    for moment in moments:
        places = []
        for tensor in tensors_of(moment):
            places.append(memory[at : at + tensor.nbytes].view(tensor.dtype))
            at += aligned(tensor.nbytes)
        taken.append(BlockFloats(*places) if isinstance(moment, BlockFloats) else places[0])
    return taken


def _copy(sources: Sequence[Moment], targets: Sequence[Moment]) -> None:
    for source, target in zip(sources, targets, strict=True):
        for tensor, into in zip(tensors_of(source), tensors_of(target), strict=True):
            into.copy_(tensor, non_blocking=True)
