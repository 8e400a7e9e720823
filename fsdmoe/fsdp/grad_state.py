"""The states of a unit's gradient, which of them follow which, and what a snapshot of one holds."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class GradState(Enum):
    """See :mod:`fsdmoe.fsdp.grads`."""

    EMPTY = auto()
    OPEN = auto()
    REDUCING = auto()
    PARTIAL = auto()
    FINAL = auto()
    BROKEN = auto()


_EMPTY, _OPEN, _REDUCING = GradState.EMPTY, GradState.OPEN, GradState.REDUCING
_PARTIAL, _FINAL, _BROKEN = GradState.PARTIAL, GradState.FINAL, GradState.BROKEN
MOVES = {
    _EMPTY: {_OPEN, _FINAL},  # FINAL: a user set ``parameter.grad``
    _OPEN: {_REDUCING, _FINAL, _BROKEN, _EMPTY},  # FINAL: a user zeroed all of it
    _REDUCING: {_OPEN, _REDUCING, _PARTIAL, _FINAL, _BROKEN, _EMPTY},
    _PARTIAL: {_OPEN, _REDUCING, _FINAL, _EMPTY},
    _FINAL: {_OPEN, _EMPTY},
    _BROKEN: {_FINAL, _EMPTY},
}
"""From each state, where it may lead."""


class GradSnapshot(NamedTuple):
    """All that decides what a backward does with a unit's gradient, and that a backward leaves behind on the
    host; equal snapshots lead to the same operations on the device."""

    state: GradState
    main_state: GradState
    written: tuple[bool, ...]
    """By parameter: a gradient was written since it was last emptied."""
    divisors: tuple[float, ...]
    is_staged: bool
    """A forward left a gradient for a backward that has not run."""
    is_tenant: bool
    is_stager: bool
    is_padded: bool
    """The padding of its layout is zero in its slot."""
