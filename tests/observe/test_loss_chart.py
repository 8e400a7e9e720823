"""The loss curve, read back from its own SVG."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.observe.history import Point
from fsdmoe.observe.loss_chart import (
    HEIGHT,
    WIDTH,
    loss_chart,
    make_axis,
    make_log_axis,
    running_mean,
    step_at,
    thin_out,
)

SVG = "{http://www.w3.org/2000/svg}"
SUFFIX = {"k": 1e3, "M": 1e6}


def parse(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def line_of(root, name):
    found = [line for line in root.iter(f"{SVG}polyline") if line.get("id") == name]
    return [tuple(map(float, pair.split(","))) for pair in found[0].get("points").split()] if found else []


def tick_value(text):
    return float(text[:-1]) * SUFFIX[text[-1]] if text[-1] in SUFFIX else float(text)


def scale_of(root, kind, coordinate):
    """The map from pixels to values that the tick labels promise to a reader."""
    ticks = [
        (float(t.get(coordinate)), tick_value(t.text))
        for t in root.iter(f"{SVG}text")
        if t.get("class") == kind
    ]
    assert len(ticks) >= 2
    (first_px, first), (last_px, last) = ticks[0], ticks[-1]
    assert len({value for _, value in ticks}) == len(ticks)
    return lambda px: first + (px - first_px) / (last_px - first_px) * (last - first)


def read_back(root, name):
    # Tick labels of the y axis stand four pixels below their line.
    to_step, to_value = scale_of(root, "x-tick", "x"), scale_of(root, "y-tick", "y")
    return [(to_step(x), to_value(y + 4)) for x, y in line_of(root, name)]


def test_the_curves_read_off_the_axes_are_the_data():
    losses = [Point(step, 2.2 + 3.6 * math.exp(-step / 90)) for step in [1, *range(10, 301, 10)]]
    evals = [Point(step, 2.4 + 3.0 * math.exp(-step / 80)) for step in (100, 200, 300)]
    root = parse(loss_chart(losses, evals, title="Loss"))
    for name, points in (("train-loss", losses), ("eval-loss", evals)):
        drawn = read_back(root, name)
        assert len(drawn) == len(points)
        for (step, value), point in zip(drawn, points, strict=True):
            assert step == pytest.approx(point.step, abs=0.05)
            assert value == pytest.approx(point.value, abs=0.002)
    assert len(list(root.iter(f"{SVG}circle"))) == 3
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"Loss", "step", "loss", "training (last 2.328)", "evaluation (last 2.471)"} <= set(texts)


def test_a_loss_that_falls_far_is_read_off_a_log_axis_and_its_tail_is_not_flat():
    losses = [Point(step, 2.0 + 9.0 * math.exp(-step / 100)) for step in range(1, 1001)]
    root = parse(loss_chart(losses, [], title="Loss"))
    assert "loss (log)" in [text.text for text in root.iter(f"{SVG}text")]
    ticks = [
        (float(t.get("y")) - 4, math.log(float(t.text)))
        for t in root.iter(f"{SVG}text")
        if t.get("class") == "y-tick"
    ]
    (first_px, first), (last_px, last) = ticks[0], ticks[-1]
    drawn = line_of(root, "train-loss")
    for (_, y), point in zip(drawn, losses, strict=True):
        value = math.exp(first + (y - first_px) / (last_px - first_px) * (last - first))
        assert value == pytest.approx(point.value, rel=0.01)
    linear = line_of(parse(loss_chart(losses, [], title="Loss", loss_axis="linear")), "train-loss")
    tail = slice(300, None)
    heights = [max(y for _, y in line[tail]) - min(y for _, y in line[tail]) for line in (drawn, linear)]
    assert heights[0] > 2 * heights[1]


@pytest.mark.parametrize(
    ("values", "asked", "is_log"),
    [
        ((3.0, 2.0), "auto", False),
        ((3.0, 2.0), "log", True),
        ((9.0, 2.0), "linear", False),
        ((9.0, 0.0), "log", False),
    ],
)
def test_the_loss_axis_is_as_asked_where_losses_have_logarithms(values, asked, is_log):
    losses = [Point(step, value) for step, value in enumerate(values, 1)]
    assert ("loss (log)" in loss_chart(losses, [], title="Loss", loss_axis=asked)) == is_log


@settings(deadline=None, max_examples=100)
@given(st.floats(1e-4, 1e3), st.floats(1.0, 1e5))
def test_log_axes_have_few_ticks_inside_of_them(low, ratio):
    axis = make_log_axis(low, low * ratio, 0.0, 100.0)
    assert axis.low < low
    assert low * ratio < axis.high
    assert 1 <= len(axis.ticks) <= 9
    assert all(-1e-6 <= axis.to_px(tick) <= 100 + 1e-6 for tick in axis.ticks)


def test_tokens_stand_above_the_steps_that_reached_them():
    # The batch doubles after step 100.
    tokens = [
        Point(step, 1000.0 * step if step <= 100 else 2000.0 * step - 100_000) for step in range(1, 201)
    ]
    losses = [Point(step, 3.0) for step in range(1, 201)]
    root = parse(loss_chart(losses, [], title="Loss", tokens=tokens))
    to_step = scale_of(root, "x-tick", "x")
    shown = {
        tick_value(t.text): to_step(float(t.get("x")))
        for t in root.iter(f"{SVG}text")
        if t.get("class") == "token-tick"
    }
    assert shown[100_000] == pytest.approx(100, abs=0.5)
    assert shown[200_000] == pytest.approx(150, abs=0.5)
    assert step_at([Point(10, 0.0), Point(20, 50.0)], 25.0) == 15.0


def test_everything_stays_inside_the_picture():
    losses = [Point(step, 10.0 / step) for step in range(1, 5000)]
    root = parse(loss_chart(losses, [Point(4999, 20.0)], title="Loss"))
    for name in ("train-loss", "train-loss-smooth", "eval-loss"):
        points = line_of(root, name)
        assert points
        assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in points)


def test_a_long_run_is_thinned_without_changing_its_mean():
    points = [Point(step, float(step % 7)) for step in range(1, 4001)]
    thin = thin_out(points)
    assert len(thin) == 1000
    assert thin[-1].step == 4000
    assert sum(point.value for point in thin) / 1000 == pytest.approx(sum(p.value for p in points) / 4000)
    assert thin_out(points[:1000]) == points[:1000]


def test_the_running_mean_keeps_a_straight_line_and_calms_noise():
    line = [Point(step, 5.0 - 0.01 * step) for step in range(200)]
    for smooth, point in zip(running_mean(line), line, strict=True):
        assert smooth.value == pytest.approx(point.value)
    noise = [Point(step, 1.0 if step % 2 else -1.0) for step in range(200)]
    assert max(abs(point.value) for point in running_mean(noise)[10:-10]) < 0.2


@settings(deadline=None, max_examples=100)
@given(st.floats(-1e3, 1e6), st.floats(1e-6, 1e6))
def test_axes_have_few_round_ticks_that_enclose_the_data(low, extent):
    high = low + extent
    axis = make_axis(low, high, 0.0, 100.0)
    assert axis.low <= low + 1e-6 * extent + 1e-9 * abs(low)
    assert axis.high >= high - 1e-6 * extent - 1e-9 * abs(high)
    assert 2 <= len(axis.ticks) <= 9
    assert axis.to_px(axis.low) == pytest.approx(0.0)
    assert axis.to_px(axis.high) == pytest.approx(100.0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_step_ticks_are_whole_and_on_the_axis(low, extent):
    axis = make_axis(low, low + extent, 0.0, 100.0, whole=True, tight=True)
    assert all(tick == round(tick) and low <= tick <= low + extent for tick in axis.ticks)
    assert axis.ticks


@pytest.mark.parametrize("losses", [[], [Point(3, 2.5)], [Point(3, 2.5), Point(4, 2.5)], [Point(1, 0.0)]])
def test_few_or_equal_points_still_make_a_chart(losses):
    root = parse(loss_chart(losses, [], title="a < b & c"))
    assert root.find(f"{SVG}title").text == "a < b & c"
    if not losses:
        assert "no finite loss was logged" in [text.text for text in root.iter(f"{SVG}text")]
    else:
        assert len(line_of(root, "train-loss")) == len(losses)
