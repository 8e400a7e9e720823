"""The timeline of a run from its ``events.jsonl``, and its goodput: the share of time that made progress.

::

    |setup....|first step|training -----------x  lost |  down  |setup...|first step|training ---|
    began   start        ready      save      killed           began  restart      ready       end

Setup counts from the start of the launcher's process, or of the rank where there is none, so loading Python
and torch is part of it.

Training counts up to the step that the next start resumed at, from a checkpoint or from copies in memory:
what came after it was lost, and so was the time until its first step was done. Copies are no events: the time
of a step between two that are on record is interpolated, and where the rank that keeps the record was killed,
it follows from the time of a step in the next start. Time that the loop waited for saves is no progress
either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_WIDTH = 72
_SIGNS = {"setup": "s", "training": "=", "saving": "w", "lost": "x", "down": "."}
"""How each kind of time is drawn."""


@dataclass
class Life:
    """One start of a run, in seconds of the wall clock."""

    began: float
    step: int
    """Steps done before it."""
    ready: float | None = None
    """When its first step was done."""
    ended: float = 0.0
    """Its last event."""
    last_step: int = 0
    stalls: list[tuple[float, float]] = field(default_factory=list)
    done: list[tuple[int, float]] = field(default_factory=list)
    """Steps that are on record as done, and when, from the first on."""
    notes: list[str] = field(default_factory=list)

    def kept_until(self, resumed: int | None) -> float:
        """When the last step that counts was done; ``resumed``: the step that the next start went on from."""
        if self.ready is None:
            return self.began
        if resumed is None:
            return self.ended
        step, at = max((known for known in self.done if known[0] <= resumed), default=(resumed, self.ready))
        next_step, next_at = min((known for known in self.done if known[0] > resumed), default=(step + 1, at))
        return at + (next_at - at) * (resumed - step) / (next_step - step)

    def extend_to(self, after: Life) -> None:
        """Add the steps that the next start had and this one could not record, since it was killed."""
        if not self.done or not after.done or after.step <= self.last_step:
            return
        step, at = self.done[-1]
        (first, first_at), (last, last_at) = after.done[0], after.done[-1]
        seconds = (last_at - first_at) / max(1, last - first)
        at = min(at + (after.step - step) * seconds, after.began)
        self.done.append((after.step, at))
        self.last_step = after.step
        self.ended = max(self.ended, at)


@dataclass(frozen=True)
class TimeSpan:
    """A piece of the timeline."""

    kind: str
    begin: float
    end: float


def lives_of(found: Sequence[Mapping[str, Any]]) -> list[Life]:
    """The starts of a run, from its events in order."""
    lives: list[Life] = []
    for row in found:
        kind = row["event"]
        at = float(row["time"])
        if kind in ("start", "restart"):
            began = float(row.get("began") or at)
            if lives:  # of a process that has had another start
                began = max(began, lives[-1].ended)
            lives.append(Life(min(began, at), row.get("step", 0), ended=at, last_step=row.get("step", 0)))
        if not lives:
            continue
        life = lives[-1]
        life.ended = max(life.ended, at)
        life.last_step = max(life.last_step, row.get("step", 0))
        if kind == "ready":
            life.ready = at
        elif kind == "save":
            life.stalls.append((at - row.get("stall", 0.0), at))
        elif kind in ("fault", "rollback") or (kind == "end" and row.get("status") != "finished"):
            life.notes.append(f"{kind}: {row.get('text') or row.get('status') or row.get('step')}")
        if life.ready is not None and "step" in row and kind != "rollback":
            life.done.append((row["step"], at))
        if kind == "rollback":  # as if it had been started anew, without the time for it
            step = row["step"]
            lives.append(Life(at, step, ready=at, ended=at, last_step=step, done=[(step, at)]))
    for life, after in pairwise(lives):
        life.extend_to(after)
    return lives


def changes_of(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What later starts changed in the configuration, as far as steps of before and after it are left."""
    changed: list[tuple[int, dict[str, tuple[str, str]]]] = []
    for row in found:
        if row["event"] != "restart":
            continue
        step = row.get("step", 0)
        keys: dict[str, tuple[str, str]] = {}
        # What starts whose steps were trained again had changed, this one has changed too, unless back.
        again = [each for at, each in changed if at >= step]
        for key, old, new in [*((k, *v) for each in again for k, v in each.items()), *_told(row)]:
            keys[key] = (keys.get(key, (old, new))[0], new)
        changed = [known for known in changed if known[0] < step]
        keys = {key: values for key, values in keys.items() if values[0] != values[1]}
        if keys:
            changed.append((step, keys))
    return [
        f"from step {step + 1} on: " + ", ".join(f"{key} {old} -> {new}" for key, (old, new) in keys.items())
        for step, keys in changed
        if step
    ]


def _told(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value before and value after, of lines such as ``optim.lr 0.1 -> 0.2``. Where a start looks for a
    checkpoint changes nothing of what is trained."""
    found = []
    for line in row.get("changed", ()):
        key, _, values = line.partition(" ")
        old, _, new = values.partition(" -> ")
        if not key.startswith("checkpoint."):
            found.append((key, old, new))
    return found


def spans_of(lives: Sequence[Life]) -> list[TimeSpan]:
    """The whole timeline, without gaps."""
    spans: list[TimeSpan] = []

    def add(kind: str, begin: float, end: float) -> None:
        if end > begin:
            spans.append(TimeSpan(kind, begin, end))

    for life, after in zip(lives, [*lives[1:], None], strict=True):
        begin = life.ready if life.ready is not None else life.ended
        add("setup", life.began, begin)
        kept = life.kept_until(None if after is None else after.step)
        at = begin
        for stall_begin, stall_end in life.stalls:
            if stall_end <= kept:
                add("training", at, stall_begin)
                add("saving", max(at, stall_begin), stall_end)
                at = max(at, stall_end)
        add("training", at, kept)
        add("lost", max(at, kept), life.ended)
        if after is not None:
            add("down", life.ended, after.began)
    return spans


def goodput(spans: Sequence[TimeSpan]) -> float:
    """The share of the time that made progress; 0 where nothing is known."""
    whole = sum(span.end - span.begin for span in spans)
    return sum(span.end - span.begin for span in spans if span.kind == "training") / whole if whole else 0.0


def drawing(spans: Sequence[TimeSpan]) -> str:
    """One line of signs; each is the kind that has most of its part of the time."""
    begin = spans[0].begin
    end = spans[-1].end
    signs = []
    for place in range(_WIDTH):
        low = begin + (end - begin) * place / _WIDTH
        high = begin + (end - begin) * (place + 1) / _WIDTH
        shares = dict.fromkeys(_SIGNS, 0.0)
        for span in spans:
            shares[span.kind] += max(0.0, min(high, span.end) - max(low, span.begin))
        signs.append(_SIGNS[max(shares, key=lambda kind: shares[kind])])
    return "".join(signs)


def timeline_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ``python -m fsdmoe.observe timeline`` prints."""
    lives = lives_of(found)
    spans = spans_of(lives)
    if not spans:
        return ["no start of a run is on record"]
    sums = {kind: sum(s.end - s.begin for s in spans if s.kind == kind) for kind in _SIGNS}
    lines = [drawing(spans), "  ".join(f"{sign} {kind} {sums[kind]:.0f} s" for kind, sign in _SIGNS.items())]
    for number, life in enumerate(lives, 1):
        seconds = life.ended - life.began
        lines.append(f"start {number}: from step {life.step} to {life.last_step}, {seconds:.0f} s")
        lines += [f"  {note}" for note in life.notes]
    count = sum(row["event"] in ("start", "restart") for row in found)
    starts = f"{count} start{'s' * (count > 1)}"
    lines.append(f"goodput {goodput(spans):.3f} of {spans[-1].end - spans[0].begin:.0f} s, {starts}")
    return lines
