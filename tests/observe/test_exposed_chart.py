"""The picture of hidden and exposed time."""

import re
import xml.etree.ElementTree

from fsdmoe.observe.exposed_chart import EXPOSED_COLOUR, HIDDEN_COLOUR, LEFT, RIGHT, WIDTH, exposed_chart
from fsdmoe.observe.exposed_trace import Timeline

RUN = Timeline([(10.0, 10.5)], {"all_to_all": [(10.25, 11.0)]})
PIXELS = WIDTH - RIGHT - LEFT


def widths(picture, colour):
    found = re.findall(
        rf'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="18.0" fill="{colour}"', picture
    )
    return [(float(x), float(width)) for x, width in found]


def test_exposed_time_is_drawn_over_the_whole_transfer_to_scale():
    picture = exposed_chart({"run": RUN}, title="A & B")
    xml.etree.ElementTree.fromstring(picture)
    ((_, whole),) = widths(picture, HIDDEN_COLOUR)
    ((left, exposed),) = widths(picture, EXPOSED_COLOUR)
    assert abs(whole - 0.75 * PIXELS) < 1
    assert abs(exposed - 0.5 * PIXELS) < 1
    assert abs(left - LEFT - 0.5 * PIXELS) < 1
    assert "250.0 ms hidden, 500.0 exposed" in picture


def test_a_window_cuts_time_and_figures():
    picture = exposed_chart({"run": RUN}, title="", window=(0.25, 0.75))
    assert "250.0 ms hidden, 250.0 exposed" in picture
    ((_, exposed),) = widths(picture, EXPOSED_COLOUR)
    assert abs(exposed - 0.5 * PIXELS) < 1


def test_runs_share_one_time_axis():
    picture = exposed_chart({"long": RUN, "short": Timeline([(0, 0.5)], {"gather": [(0.5, 0.75)]})}, title="")
    (_, long), (_, short) = widths(picture, EXPOSED_COLOUR)
    assert abs(long - 2 * short) < 2


def test_many_short_kernels_make_a_small_picture():
    compute = [(i * 1e-5, i * 1e-5 + 9e-6) for i in range(100_000)]
    assert len(exposed_chart({"run": Timeline(compute, {})}, title="")) < 20_000
