"""What the end-of-run summary needs of all rows logged so far, in a few numbers a row.

Built from rows as ``metrics.jsonl`` holds them, so that the rows of earlier starts of a resumed run and the
live ones go the same way.
"""

import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdmoe.observe.metrics import Row


class Point(NamedTuple):
    """A value at a step."""

    step: int
    value: float


@dataclass
class History:
    """The rows of a run, condensed."""

    losses: list[Point] = field(default_factory=list)
    """Finite training losses, in order."""

    tokens_at: list[Point] = field(default_factory=list)
    """Tokens trained on after the step of each row."""

    evals: list[Point] = field(default_factory=list)
    """Finite evaluation losses, in order; an evaluation of the same step again replaces the one before."""

    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each row but that of step 1, which warms up (compilation, caches)."""

    tflops: list[float] = field(default_factory=list)
    mfus: list[float] = field(default_factory=list)
    last_step: int = 0
    tokens: int = 0
    skipped: int = 0
    loss_scale: float | None = None
    """Of the last row that had one."""

    seconds: float = 0.0
    peak_memory_gib: float = 0.0
    experts: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Load figures of the last row that had any."""

    experts_step: int = 0

    def add(self, row: Row) -> None:
        """Take in one row of either kind."""
        step = row["step"]
        if "eval_loss" in row:
            if self.evals and self.evals[-1].step == step:
                self.evals.pop()
            _append(self.evals, step, row["eval_loss"])
            return
        _append(self.losses, step, row.get("loss"))
        for values, key in ((self.speeds, "tokens_per_s"), (self.tflops, "tflops"), (self.mfus, "mfu")):
            if row.get(key) is not None and step > 1:
                values.append(row[key])
        self.last_step = step
        self.tokens = row.get("tokens") or self.tokens
        _append(self.tokens_at, step, row.get("tokens"))
        self.skipped = row.get("skipped") or self.skipped
        self.loss_scale = row.get("loss_scale") or self.loss_scale
        self.seconds += row.get("seconds") or 0.0
        self.peak_memory_gib = max(self.peak_memory_gib, row.get("memory_gib") or 0.0)
        if row.get("experts"):
            self.experts, self.experts_step = row["experts"], step


def best(points: list[Point]) -> Point | None:
    """The lowest value and where it was."""
    return min(points, key=lambda point: point.value, default=None)


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _append(points: list[Point], step: int, value: float | None) -> None:
    if value is not None:
        points.append(Point(step, value))
