"""Two runs on one folder: the second is refused while the first lives, and goes on from it once it is killed.

What else the lock decides: ``tests/run/test_lock.py``."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from fsdmoe.config import to_toml
from tests.support.scripts import Program, run_program, started_ranks
from tests.support.tiny_run import tiny_config

LOCK = "run.lock"
SAVING = {"checkpoint__interval": 2, "checkpoint__load": "latest", "train__eval_interval": -1}


def steps_of(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Program, str]]:
    """A run that would go on for long, once it has saved; and its configuration."""
    config = folder / "run.toml"
    config.write_text(to_toml(tiny_config(str(folder / "run"), 1, train__steps=100_000, **SAVING)))
    program = Program("train.py", "--config", str(config))
    try:
        deadline = time.monotonic() + 300
        while not (folder / "run/checkpoints/latest").exists():
            assert program.process.is_alive(), program.stdout + program.stderr
            assert time.monotonic() < deadline, "the run did not save"
            time.sleep(0.05)
        yield program, str(config)
    finally:
        program.kill()


def test_a_second_run_is_refused_on_all_of_its_ranks_and_the_first_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as (first, config):
        with started_ranks(2, "train.py", "--config", config, "--train.steps", "2") as second:
            assert [rank.wait() for rank in second] == [2, 2], second[0].stderr
        said = "fsdmoe: train.output_dir: expected a folder that no other run uses, but the run of host "
        assert said in second[0].stderr
        assert f"pid {first.process.pid}, which began at " in second[0].stderr
        assert second[1].stderr == ""
        seen = steps_of(tmp_path / "run")[-1]
        while steps_of(tmp_path / "run")[-1] < seen + 4:
            assert first.process.is_alive(), first.stderr
            time.sleep(0.05)
        os.kill(first.process.pid, signal.SIGTERM)
        assert first.wait() == 143, first.stderr
    steps = steps_of(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1))
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_was_killed_is_gone_on_from_and_no_step_stands_twice(tmp_path: Path) -> None:
    with running(tmp_path) as (first, config):
        first.kill()
    assert (tmp_path / "run" / LOCK).exists()
    reached = steps_of(tmp_path / "run")[-1]
    again = run_program("train.py", "--config", config, "--train.steps", str(reached + 2))
    assert again.wait() == 0, again.stderr
    assert f"its process {first.process.pid} has ended" in again.stderr
    assert steps_of(tmp_path / "run") == list(range(1, reached + 3))
    assert not (tmp_path / "run" / LOCK).exists()
