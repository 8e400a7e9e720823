"""What goes wrong on one rank alone: a deletion is a warning, everything else is everyone's error with the
rank named, and nobody waits for a rank that has left."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.testing import run_ranks
from tests.support.faulty_storage import Hang, TestTime, limited


def parts(step: int) -> dict[str, Any]:
    return {"part": {"x": torch.full((1000,), float(step))}, "step": step}


def names(folder: str | Path) -> list[str]:
    return sorted(LocalStorage(folder).names())


def message_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Undeletable(LocalStorage):
    """Deletions fail, as on a file system whose permissions changed under the run."""

    is_broken = True

    def delete(self, name: str) -> None:
        if self.is_broken:
            raise PermissionError(13, "Permission denied", f"{self.root}/{name}")
        super().delete(name)


def save_twice(folder: str, asynchronous: bool) -> str:
    one = Checkpointer(CheckpointConfig(asynchronous=asynchronous, keep_last=1), folder)
    one.storage = Undeletable(folder)
    try:
        for step in (1, 2):
            one.save(step, parts(step))
            one.wait()
    except Exception as error:  # the other rank would wait for this one in its next collective
        return message_of(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_deletion_raises_on_no_rank(tmp_path: Path, asynchronous: bool) -> None:
    assert run_ranks(save_twice, 2, str(tmp_path), asynchronous) == ["", ""]
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_failed_deletion_is_a_warning_that_names_the_folder_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Checkpointer(CheckpointConfig(asynchronous=False, keep_last=1), tmp_path)
    one.storage = storage = Undeletable(tmp_path)
    one.save(1, parts(1))
    one.save(2, parts(2))
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert f"{tmp_path}/step_00000001 could not be deleted" in warning
    assert "Permission denied" in warning
    assert one.load_latest(parts(0))["step"] == 2  # type: ignore[index]
    storage.is_broken = False
    one.save(3, parts(3))
    assert names(tmp_path) == ["step_00000003"]


def test_a_half_deleted_checkpoint_is_invisible_named_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Any, ignore_errors: bool = False, **_: Any) -> None:
        if not ignore_errors and os.path.exists(path):
            raise OSError(16, "Device or resource busy", str(path))

    one = Checkpointer(CheckpointConfig(asynchronous=False, keep_last=1, retries=0), tmp_path)
    one.save(1, parts(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        one.save(2, parts(2))
        assert names(tmp_path) == ["step_00000002"]
        assert (tmp_path / ".deleting-step_00000001").exists()
        assert f"{tmp_path}/step_00000001 could not be deleted" in caplog.text
    one.save(3, parts(3))
    assert names(tmp_path) == ["step_00000003"]
    assert not list(tmp_path.glob(".deleting-*"))


class Part:
    """A part (a data loader, say) that fails on the second rank only."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in

    def checkpoint_state(self) -> dict[str, Any]:
        self._fail("telling")
        return {"x": torch.zeros(3), "position": 1}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        self._fail("taking")

    def _fail(self, what: str) -> None:
        if self.fails_in == what and dist.get_rank() == 1:
            raise RuntimeError(f"the loader's worker died while {what} its state")


def fail_with_a_part(folder: str, fails_in: str, through: str) -> str:
    run = Checkpointer(CheckpointConfig(asynchronous=False, interval=1), f"{folder}/run")
    run.save(1, {"data": Part("")})
    try:
        if fails_in == "telling" and through == "save":
            checkpoint.save(f"{folder}/one", data=Part(fails_in))
        elif fails_in == "telling":
            run.save(2, {"data": Part(fails_in)})
        elif through == "save":
            checkpoint.load(f"{folder}/run/step_00000001", data=Part(fails_in))
        else:
            run.load({"data": Part(fails_in)})
    except Exception as error:
        return message_of(error)
    return "nothing was raised here"


@pytest.mark.parametrize("through", ["save", "checkpointer"])
@pytest.mark.parametrize("fails_in", ["telling", "taking"])
def test_a_part_that_fails_on_one_rank_fails_on_all_with_the_rank_named(
    tmp_path: Path, fails_in: str, through: str
) -> None:
    first, second = run_ranks(fail_with_a_part, 2, str(tmp_path), fails_in, through, timeout=30)
    assert first.startswith("CheckpointError: ")
    assert f"rank 1: the loader's worker died while {fails_in} its state" in first
    assert second.startswith("RuntimeError: the loader's worker died")


class DriverError(Exception):
    """As drivers of object stores have them: it cannot be made again from its pickle."""

    def __init__(self, operation: str, code: int) -> None:
        super().__init__(f"{operation} failed with {code}")


class Breaking(LocalStorage):
    def __init__(self, root: str, error: Exception) -> None:
        super().__init__(root)
        self.error = error

    def create(self, name: str, file: str) -> Any:
        if dist.get_rank() == 1:
            raise self.error
        return super().create(name, file)


def fail_while_writing(folder: str, kind: str) -> str:
    errors = {"driver": DriverError("PutObject", 503), "damaged": DamagedCheckpointError("a/b", "truncated")}
    one = Checkpointer(CheckpointConfig(asynchronous=False), folder)
    one.storage = Breaking(folder, errors[kind])
    try:
        one.save(1, {"part": {f"x{n}": torch.zeros(1000) for n in range(4)}})
    except CheckpointError as error:
        return str(error)
    return "nothing was raised here"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("driver", "rank 1: DriverError: PutObject failed with 503"), ("damaged", "a/b: truncated")],
)
def test_an_error_that_cannot_be_pickled_reaches_all_ranks(tmp_path: Path, kind: str, words: str) -> None:
    for message in run_ranks(fail_while_writing, 2, str(tmp_path), kind, timeout=30):
        assert words in message


def fail_to_stage(folder: str) -> str:
    one = Checkpointer(CheckpointConfig(asynchronous=True), folder)
    if dist.get_rank() == 1:
        one._stager._reserve = no_memory  # type: ignore[method-assign]
    try:
        one.save(1, {"part": {f"x{n}": torch.zeros(1000) for n in range(4)}})
        one.wait()
    except Exception as error:
        return message_of(error)
    return "nothing was raised here"


def no_memory(runs: Any) -> None:
    raise RuntimeError("cannot pin 18 GB of host memory")


def test_a_rank_without_host_memory_for_its_copy_is_named_by_all(tmp_path: Path) -> None:
    first, second = run_ranks(fail_to_stage, 2, str(tmp_path), timeout=30)
    assert "rank 1: cannot pin" in first
    assert "cannot pin" in second
    assert not list(tmp_path.glob(".saving-*"))


def cannot_list(folder: str) -> str:
    one = Checkpointer(CheckpointConfig(asynchronous=False), folder)
    if dist.get_rank() == 0:
        one.storage.names = denied  # type: ignore[method-assign]
    try:
        one.save(1, parts(1))
    except Exception as error:
        return message_of(error)
    return "nothing was raised here"


def denied() -> list[str]:
    raise PermissionError(13, "Permission denied", "checkpoints")


def test_a_folder_that_the_first_rank_cannot_list_is_one_line_on_all_ranks(tmp_path: Path) -> None:
    for message in run_ranks(cannot_list, 2, str(tmp_path), timeout=30):
        assert message.startswith("CheckpointError: rank 0: PermissionError: ")


def hang_on_one_rank(folder: str) -> str:
    time = TestTime()
    hang = Hang(time, "write", "inside")
    one = Checkpointer(CheckpointConfig(), folder)
    one.save(1, {"part": {f"x{n}": torch.ones(1000) for n in range(4)}, "step": 1})
    one.wait()
    if dist.get_rank() == 1:
        one.storage = limited(LocalStorage(folder), hang, 3, time)
    one.save(2, {"part": {f"x{n}": torch.ones(1000) for n in range(4)}, "step": 2})
    try:
        one.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        hang.go.set()
        one.close()
    return "nothing was raised here"


def test_a_rank_that_hangs_is_named_by_all(tmp_path: Path) -> None:
    for message in run_ranks(hang_on_one_rank, 2, str(tmp_path), timeout=30):
        assert "rank 1: write " in message
        assert "step_00000002/data-00001-0.safetensors has made no progress for 300 s" in message
    assert names(tmp_path) == ["step_00000001"]
    assert not list(tmp_path.glob(".saving-*"))
