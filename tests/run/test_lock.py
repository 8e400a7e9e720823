"""The lock of a run's folder: who is refused, who takes it over, and that only one of many gets it."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdmoe.config import Config
from fsdmoe.config.command_line import CommandLine
from fsdmoe.core import events, failures
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.lifecycle import Ending
from fsdmoe.mesh import build_meshes
from fsdmoe.run.lock import LOCK, Holder, RunLock, RunLocks, hold_folders
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

ELSEWHERE: dict[str, Any] = {
    "host": "elsewhere", "space": "elsewhere/pid:[1]", "boot": "b", "machine": "m", "job": "", "launch": ""
}  # fmt: skip


def leave_lock(folder: Path, **changes: Any) -> Holder:
    """As another run would leave it, like one of this process but for ``changes``."""
    holder = replace(Holder.of_this_process(), **changes)
    (folder / LOCK).write_text(json.dumps(asdict(holder)))
    return holder


def told(folder: Path, *, take_over: bool = False) -> str:
    """What a run is told that wants the folder; empty: it got it."""
    lock = RunLock(folder)
    try:
        lock.take(take_over=take_over)
    except ConfigError as error:
        return str(error)
    lock.require()
    lock.release()
    assert {path.name for path in folder.iterdir()} <= {failures.ERRORS}
    return ""


def test_a_lock_is_there_until_it_is_released(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "new")
    lock.take()
    held = Holder.from_text((tmp_path / "new" / LOCK).read_text())
    assert held is not None
    assert held.pid == os.getpid()
    lock.release()
    lock.release()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("take_over", [False, True])
def test_a_run_on_this_machine_is_never_taken_over(tmp_path: Path, take_over: bool) -> None:
    leave_lock(tmp_path)
    said = told(tmp_path, take_over=take_over)
    assert said.startswith("train.output_dir: expected a folder that no other run uses, but the run of host ")
    assert f"pid {os.getpid()}, which began at " in said
    assert "and is running; give this run another train.output_dir, or stop that one first; " in said
    assert said.endswith(f"where {tmp_path} is a copy of its folder, remove {tmp_path / LOCK}")


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1},
        {"began": "7"},
        {"space": "here/pid:[1]"},
        {"boot": "earlier", "began": "7"},
        {**ELSEWHERE, "launch": "abc"},
        {**ELSEWHERE, "job": "12", "requeued": 0},
    ],
    ids=["killed", "pid given out again", "container ended", "rebooted", "elastic restart", "requeued"],
)
def test_the_lock_of_a_run_that_is_known_to_be_gone_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    if changes.get("pid") == -1:
        changes = {"pid": ended_pid()}
    monkeypatch.setattr("fsdmoe.run.lock._line_of", str)  # not every system has such files
    leave_lock(tmp_path, **changes)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert told(tmp_path) == ""
    assert "took over the lock of the run of" in (tmp_path / failures.ERRORS).read_text()


@pytest.mark.parametrize(
    "changes",
    [ELSEWHERE, {**ELSEWHERE, "job": "12", "requeued": 1}, {**ELSEWHERE, "launch": ""}],
    ids=["another host", "the same start of a Slurm job", "torchrun without an id"],
)
def test_a_run_that_may_live_elsewhere_is_left_alone_unless_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    held = leave_lock(tmp_path, **changes)
    said = told(tmp_path)
    assert f"the run of host elsewhere, pid {held.pid}" in said
    assert ("`squeue -j 12` lists it" if held.job else f"look for process {held.pid} on elsewhere") in said
    assert said.endswith(f"start once with --take-over, or remove {tmp_path / LOCK}")
    assert Holder.from_text((tmp_path / LOCK).read_text()) == held
    assert told(tmp_path, take_over=True) == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_that_cannot_be_read_is_one_that_somebody_may_hold(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    assert f"{LOCK} is there and cannot be read, so that a run may hold {tmp_path}" in told(tmp_path)
    assert told(tmp_path, take_over=True) == ""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[None]:
    """A process that has the flock of the lock, as that of a run in another container has."""
    hold = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def test_a_run_in_another_container_of_this_machine_is_seen_by_its_flock(tmp_path: Path) -> None:
    leave_lock(tmp_path, space="here/pid:[1]", pid=1)
    with held_elsewhere(tmp_path):
        assert "and is running" in told(tmp_path, take_over=True)
    assert told(tmp_path) == ""


def test_a_run_whose_lock_was_taken_over_is_told_so_and_leaves_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.take()
    other = leave_lock(tmp_path, **ELSEWHERE)
    with pytest.raises(ConfigError, match=r"this run no longer holds .*, which the run of host elsewhere"):
        lock.require()
    lock.release()
    assert Holder.from_text((tmp_path / LOCK).read_text()) == other


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    lock = RunLock(tmp_path)
    lock.take()
    assert "and is running" in told(tmp_path)
    lock.release()
    assert told(tmp_path) == ""


def race(folder: Path) -> bool:
    dist.barrier()
    lock = RunLock(folder)
    try:
        lock.take()
    except ConfigError:
        got = False
    else:
        got = True
    dist.barrier()
    lock.release()
    return got


def test_of_many_that_find_a_dead_lock_at_once_one_gets_it(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        leave_lock(folder, began="7")
        assert sum(run_ranks(race, 4, folder)) == 1
        assert [path.name for path in folder.iterdir()] == [failures.ERRORS]


def test_checkpoints_that_are_kept_apart_are_locked_too(tmp_path: Path) -> None:
    config = tiny_config(
        str(tmp_path / "a"), 1, checkpoint__folder=str(tmp_path / "kept"), checkpoint__interval=1
    )
    other = tiny_config(
        str(tmp_path / "b"), 1, checkpoint__folder=str(tmp_path / "kept"), checkpoint__interval=1
    )
    first, second = RunLocks(config), RunLocks(other)
    first.take(take_over=False)
    with pytest.raises(ConfigError, match=r"checkpoint\.folder: expected a folder that no other run uses"):
        second.take(take_over=False)
    second.release()
    first.release()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["a", "b", "kept"]


def test_a_refused_start_leaves_the_errors_of_the_run_that_goes_on_alone(tmp_path: Path) -> None:
    config = tiny_config(str(tmp_path), 1)
    first = RunLocks(config)
    first.take(take_over=False)
    with Ending(tmp_path) as ending:
        hold_folders(CommandLine(config, dry_run=False, world_size=1), ending)
    assert ending.code == 2
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    first.release()


def _overtaken(config: Config, folder: Path) -> str:
    """What a run is told whose lock another takes over behind its first save."""
    with Ending(folder) as ending:
        meshes = build_meshes(config.mesh)
        locks = hold_folders(CommandLine(config, dry_run=False, world_size=2), ending)
        run = Run(config, meshes)
        locks.guard(run.checkpoints, ending, run.leave_folder)
        run.train_step()
        run.checkpoints.save(1, run.state(), in_background=False)
        if dist.get_rank() == 0:
            leave_lock(folder, **ELSEWHERE)
        with pytest.raises(ConfigError) as caught:
            run.loop([])
        run.close("failed")
    return str(caught.value)


def test_a_run_whose_folder_was_taken_over_stops_before_it_writes(tmp_path: Path) -> None:
    config = tiny_config(str(tmp_path), 2, train__steps=20, checkpoint__interval=2)
    for told in run_ranks(_overtaken, 2, config, tmp_path):
        assert told.startswith(
            f"train.output_dir: this run no longer holds {tmp_path}, which the run of host"
        )
    assert [path.name for path in (tmp_path / "checkpoints").glob("step*")] == ["step_00000001"]
    assert not (tmp_path / "summary.txt").exists()
    assert not (tmp_path / failures.ERRORS).exists()
    assert [each["event"] for each in events.read(tmp_path)][-1] == "ready"
    assert "elsewhere" in (tmp_path / LOCK).read_text()
