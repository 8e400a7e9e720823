"""One AdamW update of some stretches: by a fused kernel where one can run, else in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdmoe.kernels.adamw_step import AdamWStep, adamw_small_reference_
from fsdmoe.kernels.backend import triton_for
from fsdmoe.optim.stretches import GroupMoments, Stretch


def update(settings: dict[str, Any], stretches: Sequence[Stretch], found_inf: torch.Tensor | None) -> None:
    """Step ``stretches`` with the settings of their parameter group."""
    left = [s for s in stretches if not _update_fused(s, settings, found_inf)]
    alike: list[Stretch] = []
    for stretch in left:
        if stretch.place is None and _dtypes(stretch) == {stretch.main.dtype}:
            alike.append(stretch)
        else:
            adamw_small_reference_(
                stretch.main, stretch.grad, stretch.exp_avg, stretch.exp_avg_sq,
                _numbers(stretch, settings, found_inf), stretch.place, stochastic=stretch.stochastic,
            )  # fmt: skip
    if alike:
        beta1, beta2 = settings["betas"]
        torch._fused_adamw_(
            [s.main for s in alike],
            [s.grad for s in alike],
            [s.exp_avg for s in alike],  # type: ignore[misc]
            [s.exp_avg_sq for s in alike],  # type: ignore[misc]
            [],
            [s.step for s in alike],
            lr=settings["lr"], beta1=beta1, beta2=beta2, weight_decay=settings["weight_decay"],
            eps=settings["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=found_inf,
        )  # fmt: skip


def _dtypes(stretch: Stretch) -> set[torch.dtype]:
    buffers = (stretch.grad, stretch.exp_avg, stretch.exp_avg_sq)
    return {buffer.dtype for buffer in buffers if isinstance(buffer, torch.Tensor)}


def _numbers(stretch: Stretch, settings: dict[str, Any], found_inf: torch.Tensor | None) -> AdamWStep:
    beta1, beta2 = settings["betas"]
    return AdamWStep(
        lr=settings["lr"], beta1=beta1, beta2=beta2, eps=settings["eps"],
        weight_decay=settings["weight_decay"], step=stretch.step, found_inf=found_inf,
    )  # fmt: skip


def rounds_weights(moments: GroupMoments) -> bool:
    """Whether an update of a group's main weights also writes those in compute precision."""
    weights = moments.group.weights
    return triton_for(weights.main) is not None and (weights.scales is None or moments.writes_codes)


def _update_fused(stretch: Stretch, settings: dict[str, Any], found_inf: torch.Tensor | None) -> bool:
    """One launch for everything, where it can run; whether it did."""
    fused = triton_for(stretch.main)
    if fused is None:
        return False
    numbers = _numbers(stretch, settings, found_inf)
    buffers = (stretch.main, stretch.grad, stretch.exp_avg, stretch.exp_avg_sq)
    if stretch.codes is not None:
        for part, codes in stretch.codes:
            fused.adamw_codes_(*(buffer[part] for buffer in buffers), numbers, codes)
    else:
        fused.adamw_(
            *buffers, numbers, weight=stretch.cast, place=stretch.place, stochastic=stretch.stochastic
        )
    return True
