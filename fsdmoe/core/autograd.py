"""What autograd is doing, and how a backward of one's own stands in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def is_in_backward() -> bool:
    """Autograd runs on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def next_node() -> int:
    """The number that the next node of this thread's graph gets: later ones have larger numbers."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node() -> int:
    """The number of the node that autograd runs on this thread; -1 where it runs none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of that name. Where nobody asks for a second derivative, as in every training step,
    backward runs without it: it costs the host as much as three small operations."""
    guarded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run
