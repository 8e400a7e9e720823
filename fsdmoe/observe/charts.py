"""Every picture of a run, drawn with matplotlib (the extra ``charts``). This module is the only one that
imports it, and is imported where something is drawn.

Colours are plain hex values. :func:`inline_svg` replaces those of text and frame by CSS variables, so that
one picture serves a light and a dark page.

Legend: E experts, C columns, N points.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fsdmoe.observe.config import LossAxis
from fsdmoe.observe.exposed import KINDS, Exposure, Interval, exposure, merged, without
from fsdmoe.observe.exposed_trace import Timeline
from fsdmoe.observe.heatmap import SPAN, load_tones
from fsdmoe.observe.history import Point
from fsdmoe.observe.text import short

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError("charts need matplotlib: pip install 'fsdmoe[charts]'") from error

Array = NDArray[np.float64]

INK, FAINT = "#3c4048", "#e3e6ea"
TRAIN_COLOUR, SMOOTH_COLOUR, EVAL_COLOUR = "#9dbce0", "#2f5f9e", "#d9542b"
COMPUTE_COLOUR, EXPOSED_COLOUR, HIDDEN_COLOUR = "#2f5f9e", "#d9542b", "#f3c4b2"
# At least three to one on white and on the dark page.
RUN_COLOURS = ("#3b7dd8", "#d9542b", "#2a9d6f", "#a259c4", "#b8860b", "#c2457f", "#3a9fb0", "#7a7f87")
RUN_DASHES = ("-", "--", "-.", ":")  # runs differ by more than their colour
# Less than a quarter is drawn as a quarter; what is under the scale is nothing at all, what is missing grey.
LOAD_COLOURS = LinearSegmentedColormap.from_list("load", ["#2166ac", "#f7f7f7", "#b2182b"]).with_extremes(
    under="#000000", bad="#969696"
)
LEVELS = (-2, -1, 0, 1, 2)
ROUND = (1, 2, 2.5, 5, 10)  # what ticks are multiples of

MAX_POINTS = 1000
SMOOTH_FROM = 12  # fewer points than this need no running mean
LOG_FROM = 3.0  # highest over lowest value from which a logarithmic axis shows more
ASPECT = 1.5  # width over height of the grid of layers, about
PANEL_WIDTH = 3.4  # inches for a layer
FAST_PNG = {"compress_level": 1}  # the run waits meanwhile
PIXEL = 5e-4
"""Share of the time axis below which ranges are drawn as one: pictures of long runs stay small."""

STYLE: dict[Any, Any] = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "fsdmoe", "figure.dpi": 100.0,
    "figure.constrained_layout.use": True, "legend.frameon": False, "axes.axisbelow": True,
    "axes.xmargin": 0.02, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "font.size": 10.0,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": FAINT, "ytick.left": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


class Curve(NamedTuple):
    """One run in a chart of several."""

    name: str
    points_N2: Array
    """x and y of each point."""
    evals_N2: Array | None = None
    """Evaluations, drawn as dots."""


@rc_context(STYLE)
def loss_chart(
    losses: Sequence[Point],
    evals: Sequence[Point],
    *,
    title: str,
    tokens: Sequence[Point] = (),
    loss_axis: LossAxis = "auto",
) -> str:
    """The loss over steps as an SVG document; ``tokens`` trained on by some steps are the axis above."""
    figure = Figure(figsize=(8.6, 5.2))
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel("step")
    points_N2 = _array([*losses, *evals])
    if not len(points_N2):
        axes.text(0.5, 0.5, "no finite loss was logged", transform=axes.transAxes, ha="center")
        return _svg(figure, title)
    thin_N2 = thin_out(_array(losses))
    has_mean = len(thin_N2) >= SMOOTH_FROM
    if losses:
        label = f"training (last {losses[-1].value:.4g})"
        colour = TRAIN_COLOUR if has_mean else SMOOTH_COLOUR  # pale only with the smoothed line
        axes.plot(*thin_N2.T, color=colour, label=label, gid="train-loss", **_lonely(thin_N2))
    if has_mean:
        axes.plot(
            *running_mean(thin_N2).T, color=SMOOTH_COLOUR, lw=2.2, label="smoothed", gid="train-loss-smooth"
        )
    if evals:
        label = f"evaluation (last {evals[-1].value:.4g})"
        marker = "o" if len(evals) <= 100 else None
        axes.plot(*_array(evals).T, color=EVAL_COLOUR, marker=marker, ms=4, label=label, gid="eval-loss")
    steps_N = points_N2[:, 0]
    if 0 < steps_N.min() <= steps_N.max() / 10:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=ROUND, integer=True))
    is_log = _set_y_scale(axes, points_N2[:, 1], loss_axis)
    axes.set_ylabel("loss (log)" if is_log else "loss")
    _add_token_axis(axes, _array(tokens))
    figure.legend(loc="outside lower left", ncols=3)
    return _svg(figure, title)


def _add_token_axis(axes: Axes, tokens_N2: Array) -> None:
    """Round numbers of tokens above the frame, each over the step that reached it."""
    low, high = axes.get_xlim()
    if low == 0:
        tokens_N2 = np.concatenate([np.zeros((1, 2)), tokens_N2])
    if len(tokens_N2) < 2 or tokens_N2[-1, 1] <= tokens_N2[0, 1]:
        return
    steps_N, counts_N = tokens_N2.T
    ticks = [
        t
        for t in MaxNLocator(8, steps=ROUND).tick_values(*counts_N[[0, -1]])
        if counts_N[0] <= t <= counts_N[-1]
    ]
    above = axes.secondary_xaxis("top")
    above.set_xticks(np.interp(ticks, counts_N, steps_N), [short(tick, 4) for tick in ticks])
    above.set_xlabel("tokens")
    axes.set_xlim(low, high)


def _set_y_scale(axes: Axes, values_N: Array, wanted: LossAxis) -> bool:
    """Whether the axis is logarithmic: as asked; auto where the values fall far. Never with a value of 0 or
    less, which has no logarithm."""
    low, high = values_N.min(), values_N.max()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, 4)))
    if wanted == "linear" or low <= 0 or (wanted == "auto" and high / low < LOG_FROM):
        return False
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    subs = (1.0, 2.0, 5.0) if high / low > 30 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs) if high / low >= LOG_FROM else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, 4)))
    return True


def thin_out(points_N2: Array) -> Array:
    """At most ``MAX_POINTS``: neighbours are averaged in groups of equal size, at the last one's place."""
    size = max(1, math.ceil(len(points_N2) / MAX_POINTS))
    starts = np.arange(0, len(points_N2), size)
    if size == 1:
        return points_N2
    sizes = np.diff(starts, append=len(points_N2))
    return np.stack(
        [points_N2[starts + sizes - 1, 0], np.add.reduceat(points_N2[:, 1], starts) / sizes], axis=1
    )


def running_mean(points_N2: Array) -> Array:
    """Mean over a window of about a twentieth of the points around each one, so that it does not lag behind.

    Towards the ends the window shrinks evenly on both sides, which keeps it centred.
    """
    number = len(points_N2)
    index = np.arange(number)
    reach = np.minimum(max(1, number // 40), np.minimum(index, number - 1 - index))
    sums = np.concatenate([[0.0], points_N2[:, 1].cumsum()])
    means = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    return np.stack([points_N2[:, 0], means], axis=1)


@rc_context(STYLE)
def curves_chart(
    curves: Sequence[Curve], *, title: str, labels: tuple[str, str], is_smoothed: bool, from_zero: bool
) -> str:
    """Several runs over one axis, as an SVG element for a page; empty where no run has a value.

    Args:
        curves: The runs.
        title: What assistive technology says of it.
        labels: Of the axes, x and y.
        is_smoothed: Whether a running mean is drawn over pale values.
        from_zero: Whether the values are drawn over all of their size, never over a part or a logarithm.
    """
    if not any(len(curve.points_N2) for curve in curves):
        return ""
    figure = Figure(figsize=(5.2, 3.6))
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        dashes = RUN_DASHES[(number + number // len(RUN_COLOURS)) % len(RUN_DASHES)]
        thin_N2 = thin_out(curve.points_N2)
        if is_smoothed and len(thin_N2) >= SMOOTH_FROM:
            axes.plot(*thin_N2.T, color=colour, lw=1, alpha=0.35)
            thin_N2 = running_mean(thin_N2)
        axes.plot(*thin_N2.T, dashes, color=colour, lw=1.8, label=_shortened(curve.name), **_lonely(thin_N2))
        if curve.evals_N2 is not None:
            axes.plot(*curve.evals_N2.T, "o", color=colour, ms=5, markeredgecolor=INK, markeredgewidth=0.8)
    axes.set_xlabel(labels[0])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, 4)))
    values_N = np.concatenate([curve.points_N2 for curve in curves])[:, 1]
    is_log = _set_y_scale(axes, values_N, "linear" if from_zero else "auto")
    if from_zero:
        axes.set_ylim(0, 1.05 * values_N.max() or 1)
    axes.set_ylabel(f"{labels[1]} (log)" if is_log else labels[1])
    figure.legend(loc="outside lower left", ncols=2)
    return inline_svg(_svg(figure, title, is_inline=True))


def load_picture(counts: Mapping[str, Tensor], *, first_step: int, last_step: int) -> bytes:
    """Heat maps of all layers as a PNG file, from counts_EC of each."""
    file = io.BytesIO()
    with rc_context(STYLE):
        _load_figure(counts, first_step, last_step).savefig(file, format="png", pil_kwargs=FAST_PNG)
    return file.getvalue()


@rc_context(STYLE)
def load_chart(counts: Mapping[str, Tensor], *, first_step: int, last_step: int, title: str) -> str:
    """The same as an SVG element for a page."""
    return inline_svg(_svg(_load_figure(counts, first_step, last_step), title, is_inline=True))


def _load_figure(counts: Mapping[str, Tensor], first_step: int, last_step: int) -> Figure:
    """All layers in one frame: a frame for each would take matplotlib seconds to lay out."""
    height = max(
        1.4, max(len(counts_EC) for counts_EC in counts.values()) / 100
    )  # an expert has its own pixels
    num_columns = min(len(counts), max(1, round(math.sqrt(ASPECT * len(counts) * height / PANEL_WIDTH))))
    num_rows = math.ceil(len(counts) / num_columns)
    figure = Figure(figsize=(max(5.2, num_columns * PANEL_WIDTH), num_rows * (height + 0.3) + 1.2))
    axes = figure.subplots()
    for number, (name, counts_EC) in enumerate(counts.items()):
        row, column = divmod(number, num_columns)
        left, top = column * PANEL_WIDTH, row * (height + 0.3)
        image = axes.imshow(
            load_tones(counts_EC), cmap=LOAD_COLOURS, vmin=-SPAN, vmax=SPAN, interpolation="nearest",
            extent=(left, left + PANEL_WIDTH - 0.2, top + height, top),
        )  # fmt: skip
        axes.text(left, top - 0.04, name, fontsize=9)
    axes.set(xlim=(0, num_columns * PANEL_WIDTH), ylim=(num_rows * (height + 0.3), -0.3), aspect="auto")
    axes.set_axis_off()
    scale = figure.colorbar(image, ax=axes, location="top", aspect=40, extend="min", extendfrac=0.05)
    scale.set_ticks(LEVELS, labels=[f"{2.0**level:g}" for level in LEVELS])
    scale.set_label("times an even share; black: no token; grey: no tokens in the layer", fontsize=9)
    figure.supxlabel(f"from step {first_step:,} to {last_step:,}; expert 0 is above", fontsize=9)
    return figure


@rc_context(STYLE)
def exposed_chart(runs: Mapping[str, Timeline], *, title: str, window: Interval | None = None) -> str:
    """Compute and traffic over time as an SVG document, runs below each other over one time axis. Pale ranges
    of a row of traffic are hidden behind compute, strong ones are exposed. Numbers at the right are sums over
    the range.

    Args:
        runs: When things ran, by name.
        title: Of the whole.
        window: Seconds from the beginning of each run; None shows all.
    """
    shown = {name: _from_zero(timeline, window) for name, timeline in runs.items()}
    span = max((end for timeline in shown.values() for _, end in _everything(timeline)), default=1.0)
    first, last = (0.0, span) if window is None else window
    found = {name: exposure(*timeline, window) for name, timeline in shown.items()}
    heights = [1.4 + len(each.kinds) for each in found.values()]
    figure = Figure(figsize=(10.8, 1.2 + 0.36 * sum(heights)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    grid = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (name, timeline) in zip(grid.flat, shown.items(), strict=True):
        axes.set_title(f"{name}: {1e3 * found[name].span:.1f} ms", fontsize=10)
        _draw_rows(axes, timeline, found[name], 1e3 * PIXEL * (last - first))
    grid.flat[-1].set(xlim=(1e3 * first, 1e3 * last), xlabel="milliseconds")
    entries = {"compute": COMPUTE_COLOUR, "hidden": HIDDEN_COLOUR, "exposed": EXPOSED_COLOUR}
    handles = [Patch(color=colour, label=label) for label, colour in entries.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    return _svg(figure, title)


def _draw_rows(axes: Axes, timeline: Timeline, found: Exposure, least: float) -> None:
    """A row of compute, and one of each kind of traffic; at least so many milliseconds are between ranges."""

    def draw(row: int, intervals: Sequence[Interval], colour: str) -> None:
        drawn = merged((1e3 * begin - least / 2, 1e3 * end + least / 2) for begin, end in intervals)
        bars = [(begin, end - begin) for begin, end in drawn]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=colour, linewidth=0)

    busy = merged(timeline.compute)
    draw(0, busy, COMPUTE_COLOUR)
    names = ["compute"]
    figures = [f"{1e3 * found.compute:.1f} ms"]
    for kind in (kind for kind in KINDS if kind in found.kinds):
        whole = merged(timeline.transfers[kind])
        draw(len(names), whole, HIDDEN_COLOUR)
        draw(len(names), without(whole, busy), EXPOSED_COLOUR)
        traffic = found.kinds[kind]
        names.append(kind.replace("_", "-"))
        figures.append(f"{1e3 * traffic.hidden:.1f} ms hidden, {1e3 * traffic.exposed:.1f} exposed")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.secondary_yaxis("right").set_yticks(range(len(names)), figures)


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


def inline_svg(document: str) -> str:
    """The element of a document, for a page that has several: ids of its parts would not be unique there, and
    the colours of its frame are the page's."""
    svg = document[document.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z.]+\w*_\d+"', "", svg)
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")


def _svg(figure: Figure, title: str, *, is_inline: bool = False) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Title": title, "Date": None}, transparent=is_inline)
    return file.getvalue()


def _array(points: Sequence[Point]) -> Array:
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _lonely(points_N2: Array) -> dict[str, Any]:
    """A line of one point would not be seen."""
    return {"marker": "o"} if len(points_N2) == 1 else {}


def _shortened(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:13]}…{name[-14:]}"
