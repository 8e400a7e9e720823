"""What is counted of a projection's operands, on request: ``precision.statistics``.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import is_in_backward
from fsdmoe.precision.formats import Scaling
from fsdmoe.precision.quantize import quantize, spread_blocks

Role = Literal["input", "grad", "weight"]
ROLES: tuple[Role, ...] = ("input", "grad", "weight")
LOWEST_EXPONENT, NUM_BINS = -48, 64
"""Of scales, in a histogram by powers of two; what lies outside falls into the first or the last bin."""
NUM_SHARES = 3
"""Counts before the histogram: elements, those that became zero, those that were clipped."""


class OperandStatistics:
    """Counts of one projection's operands, by role; sums and maxima over ranks make those of all."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(len(ROLES), NUM_SHARES + NUM_BINS, dtype=torch.int64, device=device)
        """Then blocks, by the exponent of their scale."""
        self.amax = torch.zeros(len(ROLES), device=device)

    def add(self, role: Role, x_RC: Tensor, scaling: Scaling) -> None:
        """An operand that is quantised so."""
        x, row = x_RC.detach().float(), ROLES.index(role)
        codes_RC, scales_BB = quantize(x, scaling)
        # A scale fits the largest element of its block, but for rounding. One that has itself few bits
        # (``two_level``) may be rounded down, and then clips that element.
        limit = scaling.element.largest * (1 + 2.0**-20)
        clipped = (x.abs() > limit * spread_blocks(scales_BB, scaling.block, x.shape)).sum()
        lost = ((codes_RC == 0) & (x != 0)).sum()
        self.counts[row, :NUM_SHARES] += torch.stack((lost.new_full((), x.numel()), lost, clipped))
        exponents = torch.frexp(scales_BB.flatten()).exponent.long() - 1 - LOWEST_EXPONENT
        bins, is_used = exponents.clamp(0, NUM_BINS - 1), scales_BB.flatten() > 0  # not: blocks of zeros
        self.counts[row, NUM_SHARES:].scatter_add_(0, bins, is_used.long())
        self.amax[row] = torch.maximum(self.amax[row], amax_of(x))


class OperandState:
    """Of one projection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.collects = False
        """Statistics are wanted of this step."""
        self.statistics: OperandStatistics | None = None


class Watch(NamedTuple):
    """A projection's state as one call of it has it."""

    state: OperandState | None
    notes: bool
    """The call is of a training step: what it sees is counted."""
    of_clone: bool = False
    """The weight is a clone of another rank's, which counts it."""

    @property
    def counts(self) -> bool:
        """Whether statistics of this step are wanted."""
        return self.notes and self.state is not None and self.state.collects

    def collect(self, role: Role, x_RC: Tensor, scaling: Scaling | None) -> None:
        """Count an operand that is quantised so, in a step whose statistics are wanted; one that is not
        quantised here is passed over."""
        if role == "weight" and self.of_clone:
            return
        if self.notes and self.state is not None and self.state.collects and scaling is not None:
            if self.state.statistics is None:
                self.state.statistics = OperandStatistics(x_RC.device)
            self.state.statistics.add(role, x_RC, scaling)

    def collect_in_forward(self, role: Role, x_RC: Tensor, scaling: Scaling | None) -> None:
        """The same of a forward: one that backward runs again was counted when it ran first."""
        if not is_in_backward():
            self.collect(role, x_RC, scaling)


UNWATCHED = Watch(None, False)


def watch_of(state: OperandState | None) -> Watch:
    """For a call that is made now: evaluation is not counted."""
    return UNWATCHED if state is None else Watch(state, torch.is_grad_enabled())


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, float32; zero of nothing."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return torch.linalg.vector_norm(x.detach(), torch.inf, dtype=torch.float32)
