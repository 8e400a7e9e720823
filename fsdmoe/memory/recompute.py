"""Free an intermediate result after its last use in forward, and recompute it just before backward reads it.

A norm's backward needs its input, not its output; but the projections that follow keep the output for their
own backward. It is cheap to recompute, so its memory can be freed in between::

    normed = norm(x)
    y = attention(normed)
    discard_and_recompute(normed, until=y, recompute=lambda out: norm_into(out, x))

Unlike a checkpoint, nothing is recorded twice and no more is recomputed than what was freed. The graph keeps
its tensor, only the storage is empty until the gradient of ``until`` arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def may_discard() -> bool:
    """Whether this forward's own tensors are what backward will read: not in evaluation, not while compiling,
    and not in a forward that a checkpoint repeats, whose tensors replace those of the first one's graph."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._current_graph_task_id() == -1
    )


def discard_and_recompute(tensor: Tensor, *, until: Tensor, recompute: Callable[[Tensor], None]) -> None:
    """Free ``tensor``, the only user of its storage, until the gradient of ``until`` is there; then
    ``recompute(out)`` must write there what it held.

    Everything that reads it in backward must lie between it and ``until``."""
    if not until.requires_grad:
        return
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size != tensor.numel() * tensor.element_size():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} shares its storage and cannot be freed")

    # `.data` is the same memory, but autograd does not count a write to it as a modification.
    kept = [(tensor.data, recompute)]

    def fill(_: Tensor) -> None:
        for out, make in kept:  # empty once filled, where backward runs twice over a retained graph
            out.untyped_storage().resize_(size)
            with torch.no_grad():
                make(out)

    until.register_hook(fill)
    if tensor.requires_grad:
        # A hook lives as long as the graph, perhaps through the next forward; what it holds must not. All
        # that reads the tensor is done when its own gradient is there, also on other streams.
        tensor.register_hook(lambda _: kept.clear())
    storage.resize_(0)
