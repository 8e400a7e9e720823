"""How gradients of all ranks become the sum in one rank's slice.

``reduce_scatter`` writes straight into the main gradient when it is the first of the step, else by way of a
scratch slice. ``bf16_all_to_all`` halves the traffic and still sums in float32 (MegaScale-MoE, section 5),
in no memory but the float32 gradient buffer itself::

    before   | g0 g1 g2 g3 g4 g5 g6 g7 |         float32, one slot
    cast     | b0..b7     |  (free)    |         rounded to bfloat16, in place, into the first half
    exchange | (sent)     | r0 r1 r2 .. |        every rank's bfloat16 contribution to this rank's slice
    sum      main_grad += r0 + r1 + ...          added up in float32
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from fsdmoe.compat import reduce_scatter
from fsdmoe.fsdp.collectives import Stage, all_to_all

if TYPE_CHECKING:
    from fsdmoe.fsdp.param_group import ParamGroup

_FIRST_CAST = 1 << 20  # elements cast by way of a temporary; after them, source and target no longer overlap


def local(work: Callable[[], object]) -> Stage:
    """Local work as a stage of a transfer."""

    def stage(async_op: bool) -> None:
        work()

    return stage


def exchange_stages(group: ParamGroup, *, first: bool) -> list[Stage]:
    """Add every rank's ``full_grad`` into ``main_grad`` (overwrite it if ``first``)."""
    full, target, context = group.full_grad, group.main_grad, group.context
    assert full is not None
    assert target is not None
    numel = group.layout.slice_numel
    direct = first and full.dtype == target.dtype and full.device == target.device
    if group.layout.num_ranks == 1:
        return [local(partial(_add, target, full, first))]
    out = target if direct else context.scratch(numel, full.dtype)
    if context.policy.fsdp.grad_exchange == "bf16_all_to_all":
        received_RS = full.view(torch.bfloat16)[full.numel() :].view(group.layout.num_ranks, numel)
        stages: list[Stage] = [
            local(partial(cast_in_place, full, context.scratch(_FIRST_CAST, torch.bfloat16))),
            partial(_exchange_halves, full, group.process_group),
            local(partial(torch.sum, received_RS, 0, dtype=torch.float32, out=out)),
        ]
    else:
        stages = [partial(reduce_scatter, out, full, group.process_group)]
    return stages if direct else [*stages, local(partial(_add, target, out, first))]


def cast_in_place(full: torch.Tensor, temporary: torch.Tensor) -> torch.Tensor:
    """Round a float32 buffer to bfloat16 inside its own first half; returns that half.

    Element i moves from byte 4i to byte 2i, so a stretch [a, 2a) lands on bytes that were read already. Only
    the very first stretch has to go by way of ``temporary``."""
    half = full.view(torch.bfloat16)[: full.numel()]
    done = min(temporary.numel(), full.numel())
    half[:done].copy_(temporary[:done].copy_(full[:done]))
    while done < full.numel():
        end = min(2 * done, full.numel())
        half[done:end].copy_(full[done:end])
        done = end
    return half


def _exchange_halves(full: torch.Tensor, group: torch.distributed.ProcessGroup, async_op: bool):  # type: ignore[no-untyped-def]
    halves = full.view(torch.bfloat16)
    return all_to_all(halves[full.numel() :], halves[: full.numel()], group, async_op)


def _add(target: torch.Tensor, value: torch.Tensor, first: bool) -> None:
    if first:
        target.copy_(value, non_blocking=True)
    else:
        target.add_(value.to(target.device))
