"""What is remembered of a projection's operands from step to step: delayed scales, and statistics on request.

A **delayed** scale is known before its operand is: it follows from the largest magnitudes of the last steps,
so that one pass over the operand is enough. What is larger now is clipped. Magnitudes are a buffer of the
module, ``amax_history``, one row for inputs and one for gradients of each of its projections, so they are
saved with it; whoever knows when a step is over rolls them (``fsdmoe.quantized_state``).

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.autograd import is_in_backward
from fsdmoe.formats import AMAX_HISTORY, HISTORY_STEPS, Scaling, is_scale_history
from fsdmoe.kernels.quantize import block_scales, quantize, spread_blocks

Role = Literal["input", "grad", "weight"]
ROLES: tuple[Role, ...] = ("input", "grad", "weight")
NUM_DELAYED = 2
"""Inputs and gradients: weights do not change within a step, so their scales can always be their own."""
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

    def add(self, role: Role, x_RC: Tensor, scaling: Scaling, scales_BB: Tensor | None) -> None:
        """An operand that is quantised so."""
        x, row = x_RC.detach().float(), ROLES.index(role)
        codes_RC, scales_BB = quantize(x, scaling, scales_BB)
        # A scale of the operand's own fits its largest element, but for rounding: only given ones clip.
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

    def __init__(self, name: str, owner: nn.Module, row: int, *, is_delayed: bool) -> None:
        """``row``: where its inputs stand in the owner's history; gradients follow."""
        self.name = name
        self.is_delayed = is_delayed
        self.known: set[Role] = set()
        """Of which operands a magnitude was rolled into the history, as far as the host knows."""
        self.collects = False
        """Statistics are wanted of this step."""
        self.statistics: OperandStatistics | None = None
        self.amax: Tensor | None = None
        """Of this step, inputs and gradients; zero where none were seen, at one place for good: graphs write
        there."""
        self.noted: set[Role] = set()
        """Which were seen in this step, as far as the host knows, which is told nothing by a graph."""
        self.prepared: dict[tuple[Role, Scaling], Tensor] | None = None
        """Delayed scales that were asked for, where somebody keeps them up to date for all projections
        together (``fsdmoe.quantized_state``); each has one place for good, as graphs need."""
        self._owner, self._row = owner, row

    @property
    def history(self) -> Tensor:
        """``[2, steps]``, inputs and gradients; zero where there was no step yet."""
        return getattr(self._owner, AMAX_HISTORY)[self._row : self._row + NUM_DELAYED]

    def scales(self, role: Role, x_RC: Tensor, scaling: Scaling) -> Tensor | None:
        """The delayed scale of an operand, ``[1, 1]``; None for one that has its own."""
        if not scaling.delayed:
            return None
        prepared = self.prepared if role in self.known else None
        if prepared is not None and (found := prepared.get((role, scaling))) is not None:
            return found
        seen = self.history[ROLES.index(role)].amax()
        scales = delayed_scales(seen, scaling, None if role in self.known else amax_of(x_RC)).view(1, 1)
        if prepared is not None and not (x_RC.is_cuda and torch.cuda.is_current_stream_capturing()):
            prepared[role, scaling] = scales
        return scales

    def note(self, role: Role, x_RC: Tensor, amax: Tensor | None) -> None:
        """Take down the largest magnitude of an operand of a training step, for later ones."""
        if self.is_delayed:
            place = self.place(role, x_RC.device)
            torch.maximum(place, amax_of(x_RC) if amax is None else amax, out=place)

    def place(self, role: Role, device: torch.device) -> Tensor:
        """Where the largest magnitude of this step stands, for kernels that raise it themselves."""
        if self.amax is None:
            self.amax = torch.zeros(NUM_DELAYED, device=device)
        self.noted.add(role)
        return self.amax[ROLES.index(role)]

    def discard(self) -> None:
        """Drop what this step saw."""
        self.noted.clear()
        if self.amax is not None:
            self.amax.zero_()

    def collect(self, role: Role, x_RC: Tensor, scaling: Scaling, scales_BB: Tensor | None) -> None:
        """Count an operand that is quantised so, in a step whose statistics are wanted."""
        if self.collects:
            if self.statistics is None:
                self.statistics = OperandStatistics(x_RC.device)
            self.statistics.add(role, x_RC, scaling, scales_BB)


class Watch(NamedTuple):
    """A projection's state as one call of it has it."""

    state: OperandState | None
    notes: bool
    """The call is of a training step: what it sees is taken down."""

    def scales(self, role: Role, x_RC: Tensor, scaling: Scaling) -> Tensor | None:
        """See :meth:`OperandState.scales`; without a state all operands have scales of their own."""
        return None if self.state is None else self.state.scales(role, x_RC, scaling)

    def note(self, role: Role, x_RC: Tensor, amax: Tensor | None = None) -> None:
        """See :meth:`OperandState.note`; ``amax`` where it is known."""
        if self.notes and self.state is not None:
            self.state.note(role, x_RC, amax)

    def past(self, role: Role) -> tuple[Tensor | None, bool]:
        """For kernels that find delayed scales themselves: the magnitudes of the last steps, and whether they
        are enough: else an operand without any has the scale of what it is."""
        if self.state is None or not self.state.is_delayed:
            return None, False
        return self.state.history[ROLES.index(role)], role in self.state.known

    def place(self, role: Role, device: torch.device) -> Tensor | None:
        """See :meth:`OperandState.place`; None where nothing is taken down."""
        is_noted = self.notes and self.state is not None and self.state.is_delayed
        return self.state.place(role, device) if is_noted and self.state is not None else None

    def collect(
        self, role: Role, x_RC: Tensor, scaling: Scaling | None, scales_BB: Tensor | None = None
    ) -> None:
        """See :meth:`OperandState.collect`; an operand that is not quantised here is passed over."""
        if self.notes and self.state is not None and scaling is not None:
            self.state.collect(role, x_RC, scaling, scales_BB)

    def collect_in_forward(
        self, role: Role, x_RC: Tensor, scaling: Scaling | None, scales_BB: Tensor | None = None
    ) -> None:
        """The same of a forward: one that backward runs again was counted when it ran first."""
        if not is_in_backward():
            self.collect(role, x_RC, scaling, scales_BB)


UNWATCHED = Watch(None, False)


def watch_of(state: OperandState | None) -> Watch:
    """For a call that is made now: evaluation is not taken down."""
    return UNWATCHED if state is None else Watch(state, torch.is_grad_enabled())


def delayed_scales(seen: Tensor, scaling: Scaling, others: Tensor | None = None) -> Tensor:
    """By the largest magnitudes of the last steps. Without any an operand has the scale of what it is,
    ``others``; one that only ever was zero has 1."""
    others = torch.full_like(seen, scaling.element.largest) if others is None else others
    return block_scales(torch.where(seen > 0, seen, others), scaling)


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, float32; zero of nothing."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return torch.linalg.vector_norm(x.detach(), torch.inf, dtype=torch.float32)


def register_history(owner: nn.Module, num_projections: int) -> None:
    """Give a module the buffer that its operands' magnitudes are saved in."""
    rows = NUM_DELAYED * num_projections
    owner.register_buffer(AMAX_HISTORY, torch.zeros(rows, HISTORY_STEPS, device="cpu"))
    owner.register_load_state_dict_post_hook(_do_without_history)


def _do_without_history(_: nn.Module, keys: Any) -> None:
    """A state dict of weights alone is whole: magnitudes stay as they are."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if not is_scale_history(name)]
