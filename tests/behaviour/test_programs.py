"""Random training programs mean on the sharded model what they mean on the plain one."""

from __future__ import annotations

import pytest

from tests.support.random_programs.draw import draw_any
from tests.support.random_programs.layout import Verdict
from tests.support.random_programs.run import ROOT_COMMAND, AnyProgram, run_programs, shrink, tell_failures

SUITE, FULL = 300, 5000
CHUNK, PIECE = 300, 125
"""Meshes are made anew for each, so larger ones are cheaper."""


def check(first: int, count: int) -> list[Verdict]:
    programs = [draw_any(seed) for seed in range(first, first + count)]
    verdicts = run_programs(programs)
    failing = [(p, v.problem) for p, v in zip(programs, verdicts, strict=True) if v.problem]
    assert not failing, f"{tell_failures(programs, verdicts)}\n{explain(*failing[0])}"
    return verdicts


def explain(program: AnyProgram, problem: str) -> str:
    """The first failure with what could be left out left out, and how to see it again."""
    small = shrink(program, problem)
    return f"smallest form: {run_programs([small])[0].problem}\n{ROOT_COMMAND} --replay {str(small)!r}"


@pytest.mark.parametrize("first", range(0, SUITE, CHUNK))
def test_programs_do_on_the_sharded_model_what_they_do_on_the_plain_one(first: int) -> None:
    verdicts = check(first, CHUNK)
    # programs that end early, refused or undecided, compare nothing
    assert sum(len(verdict.done) for verdict in verdicts) > 6 * CHUNK


@pytest.mark.full
@pytest.mark.parametrize("first", range(SUITE, SUITE + FULL, PIECE))
def test_many_more_programs_do_so_too(first: int) -> None:
    check(first, PIECE)
