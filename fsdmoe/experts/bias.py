"""Auxiliary-loss-free balancing: a per-expert bias on the choice, moved once an optimizer step.

After each step every expert that received less than the mean gets a slightly higher bias, every other one a
slightly lower one: ``bias += rate * sign(mean(load) - load)``. Loads are those of the whole step: the sum of
every micro-batch's ``load_E`` on every rank, so the biases are the same on all ranks and under every layout.
The bias is an fp32 buffer of the router, ``e_score_correction_bias``, and part of its state dict; weights
never see it.

A step that is skipped (non-finite gradients) does not call :func:`update_biases`; nothing else keeps
loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class BiasedRouter(Protocol):
    """What is needed of a router; :class:`fsdmoe.experts.router.Router` is one, as are transformers' own."""

    @property
    def e_score_correction_bias(self) -> Tensor | None: ...


@torch.no_grad()
def update_biases(
    router_loads: Iterable[tuple[BiasedRouter, Tensor]],
    *,
    rate: float,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Move each router's bias by its loads of the step, ``(router, load_E)``, in one collective for all of
    them.

    ``load_E`` is the sum over this rank's micro-batches; ``group`` holds all ranks that brought tokens to the
    step (none: one process). All ranks must list the same routers in the same order. A router without any
    load keeps its bias, and with a rate of 0 all do."""
    pairs = list(router_loads) if rate else []
    if not pairs:
        return
    loads = [load_E.detach().to(torch.float32) for _, load_E in pairs]
    if group is not None and group.size() > 1:
        flat = torch.cat(loads)  # layers may differ in their number of experts
        dist.all_reduce(flat, group=group)
        loads = list(flat.split([load_E.numel() for load_E in loads]))
    for (router, _), load_E in zip(pairs, loads, strict=True):
        bias_E = router.e_score_correction_bias
        assert bias_E is not None  # bias_rate gives every router one
        bias_E.add_((load_E.mean() - load_E).sign().to(bias_E), alpha=rate)
