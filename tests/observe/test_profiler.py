"""Traces of the chosen steps and of no others."""

import gzip
import json

import pytest
import torch

from fsdmoe.observe import ObserveConfig
from fsdmoe.observe.profiler import StepProfiler


def run_steps(profiler, steps):
    for step in steps:
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def traced_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = [event for event in events if event["name"].startswith("train step ") and event.get("ph") == "X"]
    products = [event for event in events if event["name"] == "aten::mm"]
    steps = []
    for mark in sorted(marks, key=lambda event: event["ts"]):
        inside = [p for p in products if mark["ts"] <= p["ts"] <= mark["ts"] + mark["dur"]]
        steps.append((int(mark["name"].split()[-1]), len(inside)))
    return steps


@pytest.mark.parametrize(
    ("start_step", "profile_start", "expected"), [(0, 4, [4, 5]), (500, 4, [504, 505]), (0, 1, [1, 2])]
)
def test_the_chosen_steps_and_no_others_are_in_the_trace(tmp_path, start_step, profile_start, expected):
    config = ObserveConfig(profile=True, profile_start=profile_start, profile_steps=2)
    profiler = StepProfiler(config, folder=tmp_path / "profile", rank=0, start_step=start_step)
    run_steps(profiler, range(start_step + 1, start_step + 8))
    profiler.finish()
    assert not profiler.missed
    assert profiler.trace_path.name == f"trace_rank0_steps{expected[0]}-{expected[1]}.json.gz"
    assert list((tmp_path / "profile").iterdir()) == [profiler.trace_path]
    assert traced_steps(profiler.trace_path) == [(expected[0], 1), (expected[1], 1)]


def test_a_run_that_ends_amid_the_chosen_steps_writes_what_it_has(tmp_path):
    config = ObserveConfig(profile=True, profile_start=2, profile_steps=5, profile_ranks=(3,))
    profiler = StepProfiler(config, folder=tmp_path, rank=3)
    run_steps(profiler, [1, 2, 3])
    assert profiler.missed
    profiler.finish()
    assert profiler.trace_path == tmp_path / "trace_rank3_steps2-3.json.gz"
    assert traced_steps(profiler.trace_path) == [(2, 1), (3, 1)]


def test_a_step_that_fails_leaves_the_trace_of_those_before_it(tmp_path):
    profiler = StepProfiler(ObserveConfig(profile=True, profile_start=2), folder=tmp_path, rank=0)
    run_steps(profiler, [1, 2])
    with pytest.raises(RuntimeError, match="broken"), profiler.step(3):
        raise RuntimeError("broken")
    profiler.finish()
    assert traced_steps(profiler.trace_path)[0] == (2, 1)


def test_a_run_that_ends_in_the_warm_up_writes_nothing_and_says_so(tmp_path):
    profiler = StepProfiler(ObserveConfig(profile=True, profile_start=3), folder=tmp_path, rank=0)
    run_steps(profiler, [1, 2])
    profiler.finish()
    assert profiler.missed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "ranks", "writes"), [(0, (0,), True), (1, (0,), False), (1, (), True)])
def test_only_the_ranks_asked_for_write(tmp_path, rank, ranks, writes):
    config = ObserveConfig(profile=True, profile_start=1, profile_steps=1, profile_ranks=ranks)
    profiler = StepProfiler(config, folder=tmp_path, rank=rank)
    run_steps(profiler, [1, 2])
    profiler.finish()
    expected = [f"trace_rank{rank}_steps1-1.json.gz"] if writes else []
    assert [path.name for path in tmp_path.iterdir()] == expected


def test_without_the_flag_nothing_is_recorded(tmp_path):
    profiler = StepProfiler(ObserveConfig(profile_start=1), folder=tmp_path, rank=0)
    run_steps(profiler, [1, 2, 3])
    profiler.finish()
    assert not profiler.missed
    assert list(tmp_path.iterdir()) == []
