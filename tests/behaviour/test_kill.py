"""A run killed with SIGKILL resumes from a whole checkpoint and repeats or skips no document.

`python -m benchmarks.kill_test` does this 50 times; here are a few.
"""

from pathlib import Path

import pytest

from benchmarks.kill_test import KINDS, POINTS, Kill, plan_kills, run_kills


def test_a_run_survives_being_killed_inside_saves(tmp_path: Path) -> None:
    """The first comes before there is any checkpoint at all."""
    points = ("mid file", "before pointer")
    kills = [Kill(point, save=1 + bool(number)) for number, point in enumerate(points)]
    outcome = run_kills(tmp_path, kills, num_ranks=1)
    assert outcome.kills == 2
    assert outcome.repeated > 0


@pytest.mark.full
def test_a_run_of_two_ranks_survives_every_point_of_a_save_and_random_moments(tmp_path: Path) -> None:
    outcome = run_kills(tmp_path, plan_kills(10, num_ranks=2, seed=1), num_ranks=2)
    assert outcome.kills == 10


def test_a_plan_of_more_kills_begins_with_those_of_a_smaller_one() -> None:
    plan = plan_kills(95, num_ranks=2, seed=1)
    assert plan[:41] == plan_kills(41, num_ranks=2, seed=1)
    assert {kill.point for kill in plan} >= set(POINTS)
    assert {kill.kind for kill in plan} == {"save", *KINDS}


@pytest.mark.full
def test_a_call_goes_on_behind_a_life_that_was_interrupted(tmp_path: Path) -> None:
    """The report does not know of the checkpoints of that life."""
    run_kills(tmp_path, [Kill("before pointer", save=2)], num_ranks=1)
    (tmp_path / "report.jsonl").write_text('{"kind": "save", "point": "half a line')
    outcome = run_kills(tmp_path, [Kill("mid file", save=1)], num_ranks=1)
    assert outcome.kills == 1
