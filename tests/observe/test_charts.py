"""Pictures, read back from their own SVG."""

import io
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from fsdmoe.observe.charts import (
    EXPOSED_COLOUR,
    HIDDEN_COLOUR,
    INK,
    Curve,
    curves_chart,
    exposed_chart,
    load_chart,
    load_picture,
    loss_chart,
    running_mean,
    thin_out,
)
from fsdmoe.observe.exposed_trace import Timeline
from fsdmoe.observe.history import Point

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
RUN = Timeline([(10.0, 10.5)], {"all_to_all": [(10.25, 11.0)]})


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def ticks(root):
    """Labels of the x axes, each with its place: those below the frame, those above."""
    found = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("id", "").startswith("xtick_"):
            mark = next(group.iter(f"{SVG}use"))
            label = next(group.iter(f"{SVG}text")).text
            found.setdefault(float(mark.get("y")), {})[label] = float(mark.get("x"))
    return [found[y] for y in sorted(found, reverse=True)]


def test_the_loss_curve_names_its_lines_and_their_last_values():
    losses = [Point(step, 2.2 + 3.6 * math.exp(-step / 90)) for step in [1, *range(10, 301, 10)]]
    evals = [Point(step, 2.4 + 3.0 * math.exp(-step / 80)) for step in (100, 200, 300)]
    root = ElementTree.fromstring(loss_chart(losses, evals, title="Loss"))
    named = {group.get("id"): group for group in root.iter(f"{SVG}g")}
    assert {"train-loss", "train-loss-smooth"} <= set(named)
    assert len(list(named["eval-loss"].iter(f"{SVG}use"))) == 3, "a dot each"
    shown = {"Loss", "step", "loss", "training (last 2.328)", "smoothed", "evaluation (last 2.471)"}
    assert shown <= set(texts(root))


@pytest.mark.parametrize(
    ("values", "asked", "is_log"),
    [
        ((3.0, 2.0), "auto", False),
        ((9.0, 2.0), "auto", True),
        ((3.0, 2.0), "log", True),
        ((9.0, 2.0), "linear", False),
        ((9.0, 0.0), "log", False),
    ],
)
def test_the_loss_axis_is_as_asked_where_losses_have_logarithms(values, asked, is_log):
    losses = [Point(step, value) for step, value in enumerate(values, 1)]
    assert ("loss (log)" in loss_chart(losses, [], title="Loss", loss_axis=asked)) == is_log


def test_tokens_stand_above_the_steps_that_reached_them():
    # The batch doubles after step 100.
    tokens = [
        Point(step, 1000.0 * step if step <= 100 else 2000.0 * step - 100_000) for step in range(1, 201)
    ]
    losses = [Point(step, 3.0) for step in range(1, 201)]
    below, above = ticks(ElementTree.fromstring(loss_chart(losses, [], title="Loss", tokens=tokens)))
    assert above["100k"] == pytest.approx(below["100"], abs=0.5)
    assert above["200k"] == pytest.approx((below["100"] + below["200"]) / 2, abs=0.5)


@pytest.mark.parametrize("losses", [[], [Point(3, 2.5)], [Point(3, 2.5), Point(4, 2.5)], [Point(1, 0.0)]])
def test_few_or_equal_points_still_make_a_chart(losses):
    root = ElementTree.fromstring(loss_chart(losses, [], title="a < b & $c$"))
    assert root.find(f"{SVG}title").text == "a < b & $c$"
    assert ("no finite loss was logged" in texts(root)) == (not losses)


def test_a_long_run_is_thinned_without_changing_its_mean():
    points_N2 = np.array([(step, float(step % 7)) for step in range(1, 3502)])
    thin_N2 = thin_out(points_N2)
    assert len(thin_N2) == 876
    assert thin_N2[-1, 0] == 3501
    assert thin_N2[:875, 1].mean() == pytest.approx(points_N2[:3500, 1].mean())
    assert len(thin_out(points_N2[:1000])) == 1000


def test_the_running_mean_keeps_a_straight_line_and_calms_noise():
    steps_N = np.arange(200.0)
    line_N2 = np.stack([steps_N, 5.0 - 0.01 * steps_N], axis=1)
    assert running_mean(line_N2) == pytest.approx(line_N2)
    noise_N2 = np.stack([steps_N, np.where(steps_N % 2, 1.0, -1.0)], axis=1)
    assert np.abs(running_mean(noise_N2)[10:-10, 1]).max() < 0.2


def test_a_chart_of_a_page_has_the_colours_of_the_page_and_no_id_twice():
    curve = Curve("a", np.array([[1.0, 2.0], [2.0, 3.0]]))
    labels = ("step", "loss")
    svg = curves_chart([curve], title="Loss & more", labels=labels, is_smoothed=True, from_zero=False)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Loss & more"
    assert INK not in svg
    assert "var(--ink)" in svg
    ids = [each.get("id") for each in root.iter() if each.get("id")]
    assert all(re.fullmatch(r"[mpC][0-9a-f_]+", each) for each in ids), ids
    assert {"a", "step", "loss"} <= set(texts(root))
    empty = Curve("a", np.zeros((0, 2)))
    assert curves_chart([empty], title="", labels=labels, is_smoothed=True, from_zero=False) == ""


@pytest.mark.parametrize(("num_layers", "num_experts", "num_columns"), [(1, 512, 300), (7, 8, 3), (3, 1, 1)])
def test_heat_maps_of_any_number_of_layers_and_experts_fit(num_layers, num_experts, num_columns):
    counts = {f"layer {n}": torch.ones(num_experts, num_columns) for n in range(num_layers)}
    picture = Image.open(io.BytesIO(load_picture(counts, first_step=1, last_step=10_000_000)))
    assert picture.height >= num_experts
    assert picture.width >= num_columns
    shown = texts(ElementTree.fromstring(load_chart(counts, first_step=1, last_step=2, title="t")))
    assert {f"layer {num_layers - 1}", "from step 1 to 2; expert 0 is above"} <= set(shown)


def widths(picture, colour):
    """Of the bars of one colour, in points."""
    root = ElementTree.fromstring(picture)
    paths = {path.get("id"): path.get("d") for path in root.iter(f"{SVG}path")}
    bars = [use for use in root.iter(f"{SVG}use") if colour in use.get("style")]
    found = []
    for bar in bars:
        places = [float(pair.split()[0]) for pair in re.findall(r"[ML] ([-\d. ]+)", paths[bar.get(LINK)[1:]])]
        found.append(max(places) - min(places))
    return found


def test_exposed_time_is_drawn_over_the_whole_transfer_to_scale():
    picture = exposed_chart({"run": RUN}, title="A & B")
    ((whole,), (exposed,)) = (widths(picture, colour) for colour in (HIDDEN_COLOUR, EXPOSED_COLOUR))
    assert exposed / whole == pytest.approx(2 / 3, rel=0.01)
    assert "250.0 ms hidden, 500.0 exposed" in picture


def test_a_window_cuts_time_and_figures():
    picture = exposed_chart({"run": RUN}, title="", window=(0.25, 0.75))
    assert "250.0 ms hidden, 250.0 exposed" in picture


def test_runs_share_one_time_axis():
    picture = exposed_chart({"long": RUN, "short": Timeline([(0, 0.5)], {"gather": [(0.5, 0.75)]})}, title="")
    long, short = widths(picture, EXPOSED_COLOUR)
    assert long == pytest.approx(2 * short, rel=0.01)


def test_many_short_kernels_make_a_small_picture():
    compute = [(i * 1e-5, i * 1e-5 + 9e-6) for i in range(100_000)]
    assert len(exposed_chart({"run": Timeline(compute, {})}, title="")) < 20_000
