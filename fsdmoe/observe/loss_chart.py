"""The loss curve of a run as an SVG file, drawn by hand: no plotting library, readable in any browser.

The polyline ``train-loss`` holds the logged losses (averaged in groups beyond 1,000 of them),
``train-loss-smooth`` a running mean once there are enough, ``eval-loss`` the evaluations with a dot each.
Steps are below, tokens above. A loss that falls far has a log axis: on a linear one its tail would be flat.
"""

import itertools
import math
from dataclasses import dataclass

from fsdmoe.observe.config import LossAxis
from fsdmoe.observe.history import Point
from fsdmoe.observe.svg import FAINT, INK, svg_line, svg_page, svg_text
from fsdmoe.observe.text import short

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 28, 96, 58
MAX_POINTS = 1000
SMOOTH_FROM = 12  # fewer points than this need no running mean
LOG_FROM = 3.0  # highest over lowest loss from which a logarithmic axis shows more
TRAIN_COLOUR, SMOOTH_COLOUR, EVAL_COLOUR = "#9dbce0", "#2f5f9e", "#d9542b"


@dataclass(frozen=True)
class ChartAxis:
    """A range of values laid over a range of pixels, evenly or by their logarithms, with round ticks."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def to_px(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start_px + part * (self.end_px - self.start_px)


def loss_chart(
    losses: list[Point],
    evals: list[Point],
    *,
    title: str,
    tokens: list[Point] | None = None,
    loss_axis: LossAxis = "auto",
) -> str:
    """The whole SVG document. ``tokens`` are those trained on by some of the steps, for the axis above."""
    head = svg_text(LEFT, 30, title, size=16, weight=600, anchor="start")
    points = losses + evals
    if not points:
        middle = svg_text(WIDTH / 2, HEIGHT / 2, "no finite loss was logged", size=14)
        return svg_page(title, head + middle, WIDTH, HEIGHT)
    steps, values = [point.step for point in points], [point.value for point in points]
    first_step = 0 if min(steps) <= max(steps) / 10 else min(steps)
    x_axis = make_axis(first_step, max(steps), LEFT, WIDTH - RIGHT, whole=True, tight=True)
    choose = make_log_axis if takes_log_axis(values, loss_axis) else make_axis
    y_axis = choose(min(values), max(values), HEIGHT - BOTTOM, TOP)
    thin = thin_out(losses)
    smooth = running_mean(thin) if len(thin) >= SMOOTH_FROM else []
    body = _frame(x_axis, y_axis) + _token_axis(tokens or [], x_axis)
    body += _curves(thin, smooth, evals, x_axis, y_axis) + _legend(losses, smooth, evals)
    return svg_page(title, head + body, WIDTH, HEIGHT)


def takes_log_axis(values: list[float], loss_axis: LossAxis) -> bool:
    """As asked; auto where the loss falls far. Never with a loss of 0 or less, which has no logarithm."""
    if loss_axis == "linear" or min(values) <= 0:
        return False
    return loss_axis == "log" or max(values) / min(values) >= LOG_FROM


def make_log_axis(low: float, high: float, start_px: float, end_px: float) -> ChartAxis:
    """A logarithmic axis a little wider than [low, high], with four to nine ticks where round values allow
    it."""
    low, high = low / 1.03, high * 1.03
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)):
        values = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = tuple(value for value in values if low <= value <= high)
        if len(ticks) >= 4:
            return ChartAxis(low, high, start_px, end_px, ticks[:: math.ceil(len(ticks) / 9)], is_log=True)
    ticks = make_axis(low, high, start_px, end_px, tight=True).ticks
    return ChartAxis(low, high, start_px, end_px, ticks, is_log=True)


def make_axis(
    low: float, high: float, start_px: float, end_px: float, *, whole: bool = False, tight: bool = False
) -> ChartAxis:
    """An axis over [low, high] with about six ticks at round values, at whole numbers only if ``whole``.

    It is widened to its outermost ticks unless ``tight``.
    """
    if high == low:
        margin = max(1.0 if whole else 0.0, abs(low) * 0.1) or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 6
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.floor(low / step), math.ceil(high / step)
    if tight:
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        low, high = first * step, last * step
    ticks = tuple(index * step for index in range(first, last + 1))
    return ChartAxis(low, high, start_px, end_px, ticks)


def thin_out(points: list[Point]) -> list[Point]:
    """At most ``MAX_POINTS``: neighbours are averaged in groups of equal size."""
    size = math.ceil(len(points) / MAX_POINTS) if points else 1
    if size == 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [Point(group[-1].step, sum(point.value for point in group) / len(group)) for group in groups]


def running_mean(points: list[Point]) -> list[Point]:
    """Mean over a window of about a twentieth of the points around each one, so that it does not lag behind.

    Towards the ends the window shrinks evenly on both sides, which keeps it centred.
    """
    half = max(1, len(points) // 40)
    smooth = []
    for index, point in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        window = points[index - reach : index + reach + 1]
        smooth.append(Point(point.step, sum(other.value for other in window) / len(window)))
    return smooth


def _frame(x_axis: ChartAxis, y_axis: ChartAxis) -> str:
    parts = []
    for value, label in zip(y_axis.ticks, _loss_labels(y_axis), strict=True):
        y = y_axis.to_px(value)
        parts.append(svg_line(LEFT, y, WIDTH - RIGHT, y, FAINT))
        parts.append(svg_text(LEFT - 10, y + 4, label, size=12, anchor="end", kind="y-tick"))
    bottom = y_axis.start_px
    for value in x_axis.ticks:
        x = x_axis.to_px(value)
        parts.append(svg_line(x, bottom, x, bottom + 5, INK))
        parts.append(svg_text(x, bottom + 20, short(value, 4), size=12, kind="x-tick"))
    parts.append(svg_line(LEFT, bottom, WIDTH - RIGHT, bottom, INK))
    middle = (y_axis.start_px + y_axis.end_px) / 2
    parts.append(svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "step", size=13))
    parts.append(
        f'<g transform="rotate(-90 20 {middle:.1f})">'
        + svg_text(20, middle + 4, "loss (log)" if y_axis.is_log else "loss", size=13).strip()
        + "</g>\n"
    )
    return "".join(parts)


def _loss_labels(y_axis: ChartAxis) -> list[str]:
    if y_axis.is_log:
        return [f"{value:.4g}" for value in y_axis.ticks]
    spacing = y_axis.ticks[1] - y_axis.ticks[0]
    decimals = max(0, math.ceil(-math.log10(spacing) - 1e-9) + (f"{spacing:.6g}".rstrip("0").endswith("25")))
    return [f"{value:.{decimals}f}" for value in y_axis.ticks]


def _token_axis(tokens: list[Point], x_axis: ChartAxis) -> str:
    """Round numbers of tokens above the frame, each over the step that reached it."""
    points = [Point(0, 0.0), *tokens] if tokens and x_axis.low == 0 else tokens
    if len(points) < 2 or points[-1].value <= points[0].value:
        return ""
    ticks = make_axis(points[0].value, points[-1].value, 0.0, 1.0, whole=True, tight=True).ticks
    parts = [
        svg_line(LEFT, TOP, WIDTH - RIGHT, TOP, FAINT),
        svg_text((LEFT + WIDTH - RIGHT) / 2, TOP - 28, "tokens", size=13),
    ]
    for value in ticks:
        x = x_axis.to_px(step_at(points, value))
        parts.append(svg_line(x, TOP - 5, x, TOP, INK))
        parts.append(svg_text(x, TOP - 10, short(value, 4), size=12, kind="token-tick"))
    return "".join(parts)


def step_at(points: list[Point], value: float) -> float:
    """The step at which a rising curve reaches ``value``, between its points by a straight line."""
    for before, after in itertools.pairwise(points):
        if before.value <= value <= after.value and after.value > before.value:
            part = (value - before.value) / (after.value - before.value)
            return before.step + part * (after.step - before.step)
    return points[-1].step


def _curves(
    losses: list[Point], smooth: list[Point], evals: list[Point], x_axis: ChartAxis, y_axis: ChartAxis
) -> str:
    colour = TRAIN_COLOUR if smooth else SMOOTH_COLOUR  # pale only with the smoothed line
    parts = [_polyline("train-loss", losses, x_axis, y_axis, colour, width=1.4)]
    parts.append(_polyline("train-loss-smooth", smooth, x_axis, y_axis, SMOOTH_COLOUR, width=2.2))
    parts.append(_polyline("eval-loss", evals, x_axis, y_axis, EVAL_COLOUR, width=1.8))
    dots = evals if len(evals) <= 100 else []
    parts += [_dot(x_axis.to_px(step), y_axis.to_px(value), EVAL_COLOUR) for step, value in dots]
    lonely = losses if len(losses) == 1 else []  # a line of one point would not be seen
    parts += [_dot(x_axis.to_px(step), y_axis.to_px(value), colour) for step, value in lonely]
    return "".join(parts)


def _legend(losses: list[Point], smooth: list[Point], evals: list[Point]) -> str:
    colour = TRAIN_COLOUR if smooth else SMOOTH_COLOUR
    series = (
        (_with_last("training", losses), losses, colour),
        ("smoothed", smooth, SMOOTH_COLOUR),  # its window shrinks at the end: the last value is the raw one
        (_with_last("evaluation", evals), evals, EVAL_COLOUR),
    )
    shown = [(label, colour) for label, points, colour in series if points]
    # 6.6 pixels are about the width of a letter, and each entry has a swatch and a gap next to its text.
    left = WIDTH - RIGHT - sum(6.6 * len(label) + 44 for label, _ in shown) + 20
    parts = []
    for label, colour in shown:
        parts.append(svg_line(left, 25.5, left + 18, 25.5, colour, width=3))
        parts.append(svg_text(left + 24, 30, label, size=13, anchor="start", kind="legend"))
        left += 6.6 * len(label) + 44
    return "".join(parts)


def _with_last(name: str, points: list[Point]) -> str:
    return f"{name} (last {points[-1].value:.4g})" if points else name


def _polyline(
    name: str,
    points: list[Point],
    x_axis: ChartAxis,
    y_axis: ChartAxis,
    colour: str,
    *,
    width: float,
) -> str:
    if not points:
        return ""
    pixels = " ".join(f"{x_axis.to_px(point.step):.2f},{y_axis.to_px(point.value):.2f}" for point in points)
    return (
        f'<polyline id="{name}" points="{pixels}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-linejoin="round" stroke-linecap="round"/>\n'
    )


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="3.5" fill="{colour}" stroke="#ffffff" stroke-width="1"/>\n'
