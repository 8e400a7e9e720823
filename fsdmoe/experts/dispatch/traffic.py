"""What a dispatcher's collectives cost: bytes and calls by phase, and waits of the host for the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DispatchTraffic:
    """Counts of one rank since they were last cleared.

    Phases: ``counts`` (how many rows go where), ``dispatch`` and ``combine`` (over EP), ``gather`` and
    ``reduce`` (over ETP), ``hand_on`` and ``hand_back`` (inside of a node, where ``dispatch`` and ``combine``
    are between nodes); a backward collective counts as ``"<phase>.backward"``. What a rank sends to itself
    is not counted.
    """

    bytes_sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    host_syncs: int = 0

    def add(self, phase: str, num_bytes: int) -> None:
        self.bytes_sent[phase] += num_bytes
        self.calls[phase] += 1

    def clear(self) -> None:
        self.bytes_sent.clear()
        self.calls.clear()
        self.host_syncs = 0
