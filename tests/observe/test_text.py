"""Numbers in few characters."""

import pytest

from fsdmoe.observe.text import duration, number, percent, short


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0304, "0.0304"), (999, "999"), (999.7, "1k"), (12345, "12.3k"), (2_457_600, "2.46M"),
     (999_999, "1M"), (30.5e9, "30.5B"), (None, "n/a")],
)  # fmt: skip
def test_short_numbers_keep_three_digits(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (63, "1:03"), (59.6, "1:00"), (3723, "1:02:03"), (273_900, "3d 04:05"), (-2, "0:00"),
     (None, "n/a")],
)  # fmt: skip
def test_durations_show_what_matters(seconds, text):
    assert duration(seconds) == text


def test_unknown_figures_are_said_to_be_unknown():
    assert percent(0.4125) == "41.2%"
    assert percent(None) == "n/a"
    assert number(2.0, ".3f") == "2.000"
    assert number(None, ".3f") == "n/a"
