"""How a run ends: asked by a signal, by a rank that died, or of itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "gloo",
)


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C ask the run to leave after the step at hand; a second Ctrl-C leaves at once.

    The list that comes back holds the signals received so far.
    """
    received: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_rank(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``flag`` holds on any rank of the group; every rank gets the same answer."""
    value = torch.tensor([float(flag)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


def lost_peer_message(error: BaseException, step: int) -> str | None:
    """A line for the user when ``error`` is what a dead or hung rank looks like from here; none otherwise."""
    text = str(error).lower()
    if not isinstance(error, dist.DistError) and not any(mark in text for mark in _LOST_PEER):
        return None
    rank = dist.get_rank() if dist.is_initialized() else 0
    return (
        f"fsdmoe: rank {rank} lost contact with another rank in step {step}; it has died or hangs. "
        f"This rank stops too. The first error above, from the other rank, is the cause; seen here: {error}"
    )
