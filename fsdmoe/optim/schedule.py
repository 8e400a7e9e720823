"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

import torch

from fsdmoe.optim.config import OptimConfig
from fsdmoe.optim.groups import config_of


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of one optimizer step, by the schedule of the ``optim`` section.

    Args:
        config: The ``optim`` section.
        step: The optimizer step; the first is 1.
        total_steps: Steps of the whole run.
    """
    return _rate(config, config.lr, config.warmup_steps, step, total_steps)


def _rate(config: OptimConfig, peak: float, warmup_steps: int, step: int, total_steps: int) -> float:
    if step <= warmup_steps:
        return peak * step / warmup_steps
    floor = peak * config.min_lr_ratio
    if config.schedule == "constant":
        return peak
    if config.schedule == "cosine":
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay_steps = max(1, round(total_steps * config.decay_fraction))
    left = total_steps - step
    return peak if left >= decay_steps else floor + (peak - floor) * max(0, left) / decay_steps


def set_learning_rates(
    optimizer: torch.optim.Optimizer, config: OptimConfig, step: int, total_steps: int
) -> None:
    """Give every parameter group its rate of one optimizer step: those of ``config.groups`` may have a peak
    and a warm-up of their own."""
    rate = learning_rate(config, step, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
        own = config_of(config.groups, group.get("name", "")) if config.groups else None
        if own is not None:
            warmup = config.warmup_steps if own.warmup_steps is None else own.warmup_steps
            group["lr"] = _rate(config, own.rate(config.lr), warmup, step, total_steps)
