"""``[optim.ema]``: an average of the weights, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least, one_of

AverageDtype = Literal["float32", "bfloat16"]
Memory = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """An average of the weights (docs/optimizers.md)."""

    decay: float = 0.0
    """What a step leaves of the average, 0.999 say; 0 is off."""
    dtype: AverageDtype = "float32"
    """How it is kept; bfloat16 is rounded stochastically."""
    memory: Memory = "device"
    """Where. From host memory it is copied to the device and back for each update."""
    every: int = 1
    """Steps between two updates, which then leave decay to that power."""

    def __post_init__(self) -> None:
        problems = at_least("optim.ema", vars(self), {"every": 1})
        if not 0 <= self.decay < 1:
            problems.append(f"optim.ema.decay: expected a number 0 to below 1, got {self.decay}; change it")
        choices = {"dtype": get_args(AverageDtype), "memory": get_args(Memory)}
        refuse(problems + one_of("optim.ema", vars(self), choices))
