"""What autograd is doing, and what is not to be done meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


def is_in_backward() -> bool:
    """Autograd runs on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No search for reference cycles in this block: a forward makes objects by the hundred thousand that all
    live until backward, and looking through them again and again is time in which the host launches nothing.
    What the block made is looked through once, after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
