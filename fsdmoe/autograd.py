"""What autograd is doing."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Autograd runs on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1
