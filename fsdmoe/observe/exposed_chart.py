"""The exposed-time picture: compute and traffic over a range of time, one row for each kind of traffic.

Rows of one run stand together, runs below each other over one time axis: with overlap and without, say. Pale
ranges of a row of traffic are hidden behind compute, strong ones are exposed. Numbers at the right are
sums over the range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdmoe.observe.exposed import KINDS, Exposure, Interval, exposure, merged, without
from fsdmoe.observe.exposed_trace import Timeline
from fsdmoe.observe.loss_chart import ChartAxis, make_axis
from fsdmoe.observe.svg import FAINT, INK, svg_line, svg_page, svg_rect, svg_text

WIDTH, LEFT, RIGHT = 1080, 104, 216
TOP, ROW, GAP, FOOT = 74, 26, 16, 48
COMPUTE_COLOUR, EXPOSED_COLOUR, HIDDEN_COLOUR = "#2f5f9e", "#d9542b", "#f3c4b2"
PIXEL = 0.4
"""What is closer together is drawn as one: pictures of long runs stay small."""


def exposed_chart(runs: Mapping[str, Timeline], *, title: str, window: Interval | None = None) -> str:
    """The whole SVG document. ``window`` takes seconds from the beginning of each run; None shows all."""
    shown = {name: _from_zero(timeline, window) for name, timeline in runs.items()}
    span = max((end for timeline in shown.values() for _, end in _everything(timeline)), default=1.0)
    first, last = (0.0, span) if window is None else window
    axis = make_axis(1e3 * first, 1e3 * last, LEFT, WIDTH - RIGHT, tight=True)
    parts, top = [svg_text(16, 30, title, size=16, weight=600, anchor="start"), _legend()], float(TOP)
    for name, timeline in shown.items():
        found = exposure(*timeline, window if window is not None else None)
        parts.append(svg_text(16, top, name, size=13, weight=600, anchor="start"))
        parts.append(svg_text(WIDTH - 16, top, f"{1e3 * found.span:.1f} ms", size=12, anchor="end"))
        top += 10
        rows = _rows(timeline, found, axis, top)
        parts.append("".join(rows))
        top += ROW * len(rows) + GAP + 12
    parts.append(_time_axis(axis, top - GAP))
    return svg_page(title, "".join(parts), WIDTH, round(top + FOOT))


def _rows(timeline: Timeline, found: Exposure, axis: ChartAxis, top: float) -> list[str]:
    busy = merged(timeline.compute)
    rows = [_row("compute", f"{1e3 * found.compute:.1f} ms", ((busy, COMPUTE_COLOUR),), axis, top)]
    for kind in (kind for kind in KINDS if kind in found.kinds):
        traffic, whole = found.kinds[kind], merged(timeline.transfers[kind])
        figures = f"{1e3 * traffic.hidden:.1f} ms hidden, {1e3 * traffic.exposed:.1f} exposed"
        coloured = ((whole, HIDDEN_COLOUR), (without(whole, busy), EXPOSED_COLOUR))
        rows.append(_row(kind.replace("_", "-"), figures, coloured, axis, top + ROW * len(rows)))
    return rows


def _row(
    name: str,
    figures: str,
    coloured: Sequence[tuple[Sequence[Interval], str]],
    axis: ChartAxis,
    top: float,
) -> str:
    parts = [
        svg_text(LEFT - 10, top + ROW / 2 + 3, name, size=12, anchor="end"),
        svg_rect(LEFT, top + 4, WIDTH - RIGHT - LEFT, ROW - 8, "#f6f7f9"),
    ]
    for intervals, colour in coloured:
        pixels = [(axis.to_px(1e3 * begin), axis.to_px(1e3 * end)) for begin, end in intervals]
        drawn = merged((begin - PIXEL / 2, end + PIXEL / 2) for begin, end in pixels)
        parts += [svg_rect(begin, top + 4, end - begin, ROW - 8, colour) for begin, end in drawn]
    parts.append(svg_text(WIDTH - RIGHT + 10, top + ROW / 2 + 3, figures, size=12, anchor="start"))
    return "".join(parts)


def _time_axis(axis: ChartAxis, top: float) -> str:
    parts = [svg_line(LEFT, top, WIDTH - RIGHT, top, INK)]
    for value in axis.ticks:
        x = axis.to_px(value)
        parts += [svg_line(x, top, x, top + 5, INK), svg_text(x, top + 20, f"{value:g}", size=12)]
    parts.append(svg_text((LEFT + WIDTH - RIGHT) / 2, top + 40, "milliseconds", size=12))
    return "".join(parts)


def _legend() -> str:
    parts, left = [svg_line(16, 44, WIDTH - 16, 44, FAINT)], WIDTH - 330.0
    entries = (("compute", COMPUTE_COLOUR), ("hidden", HIDDEN_COLOUR), ("exposed", EXPOSED_COLOUR))
    for name, colour in entries:
        parts += [svg_rect(left, 20, 14, 12, colour), svg_text(left + 20, 30, name, size=12, anchor="start")]
        left += 108
    return "".join(parts)


def _everything(timeline: Timeline) -> list[Interval]:
    return [*timeline.compute, *(each for kind in timeline.transfers.values() for each in kind)]


def _from_zero(timeline: Timeline, window: Interval | None) -> Timeline:
    """Time counted from the first thing that ran, nothing outside of the window."""
    start = min((begin for begin, _ in _everything(timeline)), default=0.0)
    low, high = window if window is not None else (0.0, float("inf"))

    def moved(intervals: Sequence[Interval]) -> list[Interval]:
        pairs = ((max(begin - start, low), min(end - start, high)) for begin, end in intervals)
        return [(begin, end) for begin, end in pairs if begin < end]

    return Timeline(moved(timeline.compute), {kind: moved(each) for kind, each in timeline.transfers.items()})
