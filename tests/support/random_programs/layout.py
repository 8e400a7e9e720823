"""What programs of every kind have: a layout of ranks before, and a verdict after."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    world: int = 1
    dp_outer: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1


@dataclass
class Verdict:
    """What became of a program."""

    problem: str = ""
    """Empty: no mismatch."""
    done: list[str] = field(default_factory=list)
    """Operations that were carried out, by kind."""
    refused: list[str] = field(default_factory=list)
    """Those that the sharded side refused and was free to."""
    widened: float = 0.0
    """The tolerance, where rounding grew beyond the usual one (see :mod:`judge`)."""
