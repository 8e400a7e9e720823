"""The papers' tables and the planner's time: figures are found on their pages, planned steps are close."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import papers
import step_time

from fsdmoe.plan import GPUS


def test_measured_and_emulated_figures_are_found_on_their_pages() -> None:
    assert "| measured |" in papers.attention()
    assert papers.ladder().count("| emulated |") == 6
    assert all(case.measured > 0 for case in step_time.CASES)


def test_a_figure_that_a_page_does_not_have_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"memory\.md has no figure like"):
        papers.of_page("memory", "no such row")


@pytest.mark.full
def test_steps_that_were_not_fitted_are_planned_within_five_percent_in_the_median_and_twelve_at_most() -> (
    None
):
    found = [abs(error) for error in step_time.errors(GPUS["h200"], step_time.CASES[1::2])]
    assert len(found) >= 12
    assert statistics.median(found) <= 0.05
    assert max(found) <= 0.12
