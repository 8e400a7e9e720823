"""Named activations wait in host memory from forward to backward.

::

    compute   | layer 0 | layer 1 | layer 2 | ...   | backward 2 | backward 1 | backward 0 |
    to host             |0 -> host|1 -> host|
    to device                                  |host -> 1  | host -> 0 |

One copy stream copies a layer's activations to the host while the next layers compute; then their device
memory is free. Compute waits for a copy only if it is more than a layer behind. Another stream copies them
back one layer ahead: when the gradient of a layer's output is there, the previous layer is fetched. Streams
wait for events; the host never waits.

Host memory comes from a pool of pinned blocks, which grows in the first step and is used again by all others.
On a CPU the same is done with plain copies.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.pinned import PinnedBlock, PinnedPool

logger = logging.getLogger(__name__)
_GIB = 2**30
_SMALLEST = 1 << 10
"""Bytes below which a copy costs more than it frees."""


@dataclass
class Figures:
    """What was done since the start, of one rank."""

    num_moved: int = 0
    bytes_moved: int = 0
    num_fetched_late: int = 0
    """Fetched when backward asked, and not ahead of it."""
    num_refused: int = 0
    """Stayed on the device because the host memory's limit was reached."""


def build_offload(memory: MemoryConfig, num_layers: int, device: torch.device) -> Offload | None:
    """For layers that compute on ``device``; None where nothing is offloaded."""
    if not memory.offload:
        return None
    limit = int(memory.offload_limit_gib * _GIB) or None
    return Offload(frozenset(memory.offload), PinnedPool(limit=limit, device=device), num_layers)


@dataclass
class Offload:
    """What all layers of a model share: streams, host memory, and which forward was the last."""

    names: frozenset[str]
    pool: PinnedPool
    num_layers: int
    figures: Figures = field(default_factory=Figures)
    last: weakref.ref[MovedLayer] | None = None
    _streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
    _has_said: bool = False

    def begin(self, index: int, *, moves: bool) -> MovedLayer:
        """A forward of the layer of this number; ``moves``: its activations leave."""
        before = None if self.last is None else self.last()
        self._say_once(index)
        # Another forward of the model has begun: its backward has nothing to do with the one before.
        chained = before if before is not None and before.index < index else None
        layer = MovedLayer(self, index, self.names if moves else frozenset(), chained)
        self.last = weakref.ref(layer)
        return layer

    def _say_once(self, index: int) -> None:
        """Once the first forward has shown how much is needed."""
        if self._has_said or index > 0 or not self.figures.num_moved:
            return
        self._has_said = True
        near = "on the device's memory node" if self.pool.is_near else "on no particular memory node"
        refused = f"; {self.figures.num_refused} tensors stay: limit reached" * bool(self.figures.num_refused)
        logger.info(
            "memory.offload: %.3g GiB of host memory in %d blocks, %s%s",
            self.pool.nbytes / _GIB, self.pool.num_blocks, near, refused,
        )  # fmt: skip

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """To the host, and to the device."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams


class MovedLayer:
    """One forward of one layer."""

    def __init__(
        self, offload: Offload, index: int, names: Collection[str], before: MovedLayer | None
    ) -> None:
        self.index = index
        self._offload, self._names = offload, names
        self._before = None if before is None else weakref.ref(before)
        self._moved: list[weakref.ref[_Moved]] = []
        self._leaving: list[weakref.ref[_Moved]] = []

    def take(self, names: Iterable[str], tensor: Tensor) -> _Moved | None:
        storage = tensor.untyped_storage()
        if not any(name in self._names for name in names) or storage.nbytes() < _SMALLEST:
            return None
        figures = self._offload.figures
        block = self._offload.pool.take(storage.nbytes(), pinned=tensor.is_cuda)
        if block is None:
            figures.num_refused += 1
            return None
        moved = _Moved(self._offload, self, block, tensor)
        figures.num_moved += 1
        figures.bytes_moved += storage.nbytes()
        self._moved.append(weakref.ref(moved))
        self._leaving.append(weakref.ref(moved))
        return moved

    def end_forward(self, output: Tensor | None) -> None:
        """Let go of what the layer before left, and of this layer's own if no layer follows; have backward
        fetch ahead from here."""
        if (before := self._chained()) is not None:
            before.let_go()
        if self.index == self._offload.num_layers - 1:
            self.let_go()
        if output is not None and output.requires_grad and before is not None:
            output.register_hook(_FetchAhead(self))

    def let_go(self) -> None:
        """Free the device memory of what has left, or will have when compute gets there."""
        leaving, self._leaving = self._leaving, []
        for reference in leaving:
            if (moved := reference()) is not None:
                moved.let_go()

    def fetch(self) -> None:
        """Start to bring back everything of this layer that is still wanted, what backward reads first
        first."""
        for reference in reversed(self._moved):
            if (moved := reference()) is not None:
                moved.start_fetch()

    def _chained(self) -> MovedLayer | None:
        return None if self._before is None else self._before()


class _FetchAhead:
    """A hook on a layer's output: its backward begins, so the layer before is due next."""

    def __init__(self, layer: MovedLayer) -> None:
        self._layer = layer  # as long as the graph: the chain of layers lives by these

    def __call__(self, grad: Tensor) -> None:
        self._layer.fetch()
        if (before := self._layer._chained()) is not None:
            before.fetch()


class _Moved:
    """A storage that waits on the host. Autograd holds it; with it goes the host memory.

    ==========  ==============  ==========  ===========================================
    state       device memory   host block  left by
    ==========  ==============  ==========  ===========================================
    leaving     the original    being written   ``let_go``, once the copy is done
    away        none            holds it    ``start_fetch``
    back        a new one       returned    the last reader
    ==========  ==============  ==========  ===========================================
    """

    def __init__(self, offload: Offload, layer: MovedLayer, block: PinnedBlock, tensor: Tensor) -> None:
        self._offload = offload
        self._layer = layer  # which fetches it in time, and lives by it
        self._device, self._nbytes = tensor.device, tensor.untyped_storage().nbytes()
        self._block: PinnedBlock | None = block
        self._value: Tensor | None = _bytes_of(tensor)
        self._is_back = self._was_read = False
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        host = block.bytes[: self._nbytes]
        if self._device.type != "cuda":
            host.copy_(self._value)
            return
        out, _ = offload.streams(self._device)
        out.wait_stream(torch.cuda.current_stream(self._device))
        if block.event is not None:  # somebody else's copy out of this block
            out.wait_event(block.event)
        with torch.cuda.stream(out):
            host.copy_(self._value, non_blocking=True)
        self._event = block.event = out.record_event()

    def let_go(self) -> None:
        """No copy is read by then that is not written: compute waits here, if the copy is that late."""
        if self._is_back or self._value is None:
            return
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._value = None

    def start_fetch(self) -> None:
        """From the host, if it is there, without waiting for it."""
        if self._value is not None or self._block is None:
            return
        host = self._block.bytes[: self._nbytes]
        self._value = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._is_back = True
        if self._device.type != "cuda":
            self._value.copy_(host)
        else:
            _, into = self._offload.streams(self._device)
            self._stream = torch.cuda.current_stream(self._device)
            into.wait_stream(self._stream)  # the memory may still be read by what was there before
            with torch.cuda.stream(into):
                self._value.copy_(host, non_blocking=True)
            self._event = self._block.event = into.record_event()
        self._return_block()

    def fetch(self) -> Tensor:
        if self._value is None:
            self._offload.figures.num_fetched_late += 1
            self.start_fetch()
        assert self._value is not None
        if self._is_back and self._event is not None:
            reader = torch.cuda.current_stream(self._device)
            reader.wait_event(self._event)
            self._was_read = True
            if reader != self._stream:
                self._value.record_stream(reader)
        return self._value

    def _return_block(self) -> None:
        if self._block is not None:
            self._offload.pool.give_back(self._block)
            self._block = None

    def __del__(self) -> None:
        # Fetched and never read: the memory goes back to a stream that knows nothing of the copy into it.
        if self._stream is not None and self._event is not None and not self._was_read:
            self._stream.wait_event(self._event)
        self._return_block()


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the tensor's storage, flat."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def refuse_capture(device: torch.device) -> None:
    """Offload inside of a CUDA graph: a graph replays addresses, and the pool gives others."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "memory.offload: expected a forward outside of CUDA graphs, got one that is captured: a graph "
            "replays the same copies to the same host memory, which several micro-batches would share; set "
            "memory.offload = [], or do not capture this model"
        )
