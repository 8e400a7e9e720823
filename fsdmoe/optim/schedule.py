"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import replace

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
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay_steps = max(1, round(total_steps * config.decay_fraction))
    left = total_steps - step
    return config.lr if left >= decay_steps else floor + (config.lr - floor) * max(0, left) / decay_steps


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
            peak = own.rate(config.lr)
            settings = replace(config, lr=peak or config.lr, warmup_steps=warmup)
            group["lr"] = learning_rate(settings, step, total_steps) if peak else 0.0
