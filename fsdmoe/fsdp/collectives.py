"""The collectives of the engine, and the streams they run on concurrently with the computation.

A *stage* is one step of a transfer: it is called with ``async_op``, starts a collective or does local work,
and returns the collective's work object if it is still running. A *comm stream* runs the stages of one
transfer after another:

===============  =============================================================================================
CudaCommStream   on a CUDA stream of its own: nothing ever blocks the host
HostCommStream   for gloo: the first collective runs in the backend's threads while the caller computes;
                 whatever comes after it happens in ``wait``
===============  =============================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fsdmoe.fsdp.access import Pending

Stage = Callable[[bool], "dist.Work | None"]


def local(work: Callable[[], object]) -> Stage:
    """Local work as a stage of a transfer. It may run later: bind its tensors and numbers now."""

    def stage(async_op: bool) -> None:
        work()

    return stage


class HostEvent:
    """On the host, work is done when the call returns."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass


Event = torch.cuda.Event | HostEvent
"""A point in a stream of work that other work can wait for."""


class CudaCommStream:
    """Stages on a CUDA stream of their own, in the order given. A handle is used again by each transfer."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)

    def handle(self) -> Pending:
        return torch.cuda.Event()

    def run(self, handle: Pending, stages: Sequence[Stage], after: Event) -> None:
        """Start ``stages`` behind ``after`` and everything that this stream runs already."""
        with torch.cuda.stream(self.stream):
            after.wait()
            for stage in stages:
                stage(False)
            handle.record()  # type: ignore[attr-defined]

    def follow(self) -> None:
        """Order what comes on this stream behind everything that the caller has started so far."""
        self.stream.wait_stream(torch.cuda.current_stream())

    def drain(self) -> None:
        """Order the caller's further work behind everything on this stream."""
        torch.cuda.current_stream().wait_stream(self.stream)

    def block(self) -> None:
        """Wait on the host until everything on this stream is done."""
        self.stream.synchronize()


class HostHandle:
    """The rest of a transfer whose collective runs in the backend's threads."""

    def __init__(self, stream: HostCommStream) -> None:
        self._stream = stream
        self.work: dist.Work | None = None
        self.rest: Sequence[Stage] = ()

    def advance(self) -> bool:
        """Run local stages up to the next collective and start it; False when nothing is left."""
        while self.rest:
            stage, self.rest = self.rest[0], self.rest[1:]
            self.work = stage(True)
            if self.work is not None:
                return True
        return False

    def finish(self) -> None:
        while self.work is not None:
            self.work.wait()
            self.work = None
            self.advance()

    def wait(self) -> None:
        self._stream.finish(self)


class HostCommStream:
    """Stages on the host. ``serial``: transfers share memory, so one must end before the next begins."""

    def __init__(self, *, serial: bool) -> None:
        self._serial = serial
        self._pending: deque[HostHandle] = deque()

    def handle(self) -> Pending:
        return HostHandle(self)

    def run(self, handle: Pending, stages: Sequence[Stage], after: Event) -> None:
        assert isinstance(handle, HostHandle)
        if self._serial:
            self.drain()
        self.finish(handle)
        handle.rest = stages
        if handle.advance():
            self._pending.append(handle)

    def finish(self, handle: HostHandle) -> None:
        if handle in self._pending:
            while True:
                first = self._pending.popleft()
                first.finish()
                if first is handle:
                    return

    def follow(self) -> None:
        pass

    def drain(self) -> None:
        while self._pending:
            self._pending.popleft().finish()

    def block(self) -> None:
        self.drain()


CommStream = CudaCommStream | HostCommStream


class CommStreams:
    """The engine's streams: gathers on one, reductions on the other."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self.gather: CommStream = CudaCommStream(device) if self._on_device else HostCommStream(serial=False)
        self.reduce: CommStream = CudaCommStream(device) if self._on_device else HostCommStream(serial=True)

    def block(self) -> None:
        """Wait on the host for both."""
        self.gather.block()
        self.reduce.block()

    def event(self) -> Event:
        return torch.cuda.Event() if self._on_device else HostEvent()
