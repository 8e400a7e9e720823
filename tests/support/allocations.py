"""Bytes that torch's allocator gave out, counted: the same on every machine, as resident memory is not (what
the C allocator keeps for later, and how it cuts its arenas, differ from run to run)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Bytes above those that were held at the beginning; known once the region has been left."""

    peak: int = 0
    end: int = 0


@contextmanager
def count_allocations() -> Iterator[Allocations]:
    """Every allocation and release of CPU tensors by this thread, those inside of torch's operators too."""
    found = Allocations()
    gc.collect()  # what earlier work left in cycles is not to be released inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        found.end += event.nbytes()
        found.peak = max(found.peak, found.end)
    assert found.peak, "nothing was counted"
