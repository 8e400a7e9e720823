"""Hidden and exposed time of each kind of traffic between ranks, from when things ran.

A moment of a step belongs to compute if any kernel computes in it. What a transfer does meanwhile is
*hidden*; the rest of it is *exposed*, and is what better overlap could save::

    compute    ████████░░░░░███████████░░░
    transfer       ██████████                      hidden 6, exposed 4 (only the transfer runs)
    idle                            ███            neither: the host was late, or a rank waited for another

Kinds of traffic: rows to experts and back (``all_to_all``), weights (``gather``), gradients (``reduce``),
what tensor and context parallelism send (``tp``, ``cp``), and the rest (``other``). Moments in which several
kinds are exposed together count for each of them, so the kinds may add up to more than the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("all_to_all", "gather", "reduce", "tp", "cp", "other")
Interval = tuple[float, float]
"""Begin and end."""

_BY_AXIS = {
    "ep": "all_to_all", "etp": "all_to_all", "expert": "all_to_all", "tp": "tp", "cp": "cp", "sequence": "cp",
}  # fmt: skip
_BY_COLLECTIVE = {
    "all_to_allv": "all_to_all", "all_to_all": "reduce", "gather": "gather", "broadcast": "gather",
    "reduce": "reduce",
}  # fmt: skip


def kind_of_traffic(collective: str, group: str) -> str:
    """By the mesh axis that a group is named after (``mesh_ep``); on axes that shard, by collective: there an
    all-to-all of equal parts is a reduction (``fsdp.grad_exchange``), one of uneven parts carries rows."""
    axis = group.removeprefix("mesh_")
    if axis in _BY_AXIS:
        return _BY_AXIS[axis]
    plain = collective.lower().replace("alltoall", "all_to_all")
    if not axis and "all_to_all" in plain:  # nothing says over which axis: rows are the usual case
        return "all_to_all"
    return next((kind for part, kind in _BY_COLLECTIVE.items() if part in plain), "other")


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def without(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """What is left of merged ``intervals`` outside of merged ``removed``."""
    found: list[Interval] = []
    first = 0
    for begin, end in intervals:
        while first < len(removed) and removed[first][1] <= begin:
            first += 1
        at, index = begin, first
        while index < len(removed) and removed[index][0] < end:
            if removed[index][0] > at:
                found.append((at, removed[index][0]))
            at = max(at, removed[index][1])
            index += 1
        if at < end:
            found.append((at, end))
    return found


@dataclass(frozen=True)
class TrafficSeconds:
    """Of one kind."""

    total: float
    """In which some transfer of the kind was under way."""
    exposed: float
    """Of these, without concurrent compute."""
    count: int
    """Transfers."""

    @property
    def hidden(self) -> float:
        return self.total - self.exposed


@dataclass(frozen=True)
class Exposure:
    """A range of time, taken apart. Seconds."""

    span: float
    compute: float
    """In which some kernel computed."""
    exposed: float
    """In which transfers ran and nothing computed: all kinds together."""
    kinds: Mapping[str, TrafficSeconds]
    """Those that there were."""

    @property
    def idle(self) -> float:
        """Neither."""
        return max(0.0, self.span - self.compute - self.exposed)


def exposure(
    compute: Iterable[Interval],
    transfers: Mapping[str, Sequence[Interval]],
    span: Interval | None = None,
) -> Exposure:
    """Take a range of time apart: ``span``, or from the first to the last of everything."""
    busy = merged(compute)
    by_kind = {kind: merged(intervals) for kind, intervals in transfers.items()}
    if span is not None:
        busy = _inside(busy, span)
        by_kind = {kind: _inside(intervals, span) for kind, intervals in by_kind.items()}
    every = merged(interval for intervals in by_kind.values() for interval in intervals)
    ends = [*busy[:1], *busy[-1:], *every[:1], *every[-1:]]
    begin, end = span or (min((e[0] for e in ends), default=0.0), max((e[1] for e in ends), default=0.0))
    kinds = {
        kind: TrafficSeconds(
            length(by_kind[kind]), length(without(by_kind[kind], busy)), len(transfers[kind])
        )
        for kind in sorted(by_kind, key=_order)
        if by_kind[kind]
    }
    return Exposure(end - begin, length(busy), length(without(every, busy)), kinds)


def _inside(intervals: Iterable[Interval], span: Interval) -> list[Interval]:
    return [(max(b, span[0]), min(e, span[1])) for b, e in intervals if e > span[0] and b < span[1]]


def _order(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def table(found: Exposure, *, num_steps: int = 1) -> list[str]:
    """Lines of text: where the time of a step went, in milliseconds and as shares of it."""
    whole = found.span or 1.0

    def row(name: str, *seconds: float) -> str:
        cells = "".join(f"{1e3 * value / num_steps:12.2f} ms" for value in seconds)
        return f"{name:14}{cells}{seconds[-1] / whole:9.1%}"

    lines = [
        f"{'a step':14}{1e3 * found.span / num_steps:12.2f} ms",
        row("compute", found.compute),
        row("exposed", found.exposed),
        row("idle", found.idle),
    ]
    if found.kinds:
        lines.append(f"{'':14}{'under way':>15}{'hidden':>15}{'exposed':>15}{'of all':>9}  transfers")
    for kind, traffic in found.kinds.items():
        name = kind.replace("_", "-")
        figures = row(name, traffic.total, traffic.hidden, traffic.exposed)
        lines.append(f"{figures}  {traffic.count / num_steps:g}")
    return lines
