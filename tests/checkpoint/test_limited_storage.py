"""Storages that fail for a moment, are slow, or hang: the run is told, and every checkpoint that is visible
is whole."""

import errno
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from fsdmoe.checkpoint.errors import DamagedCheckpointError
from fsdmoe.checkpoint.limited_storage import HungStorageError, LimitedStorage, Limits, may_pass
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.object_storage import ObjectStorage
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.checkpoint.storage import open_storage
from fsdmoe.core.errors import ConfigError
from tests.support.faulty_storage import Faulty, Hang, TestTime, limited, random_faults


def store_in_files(path: Path) -> ObjectStorage:
    storage = ObjectStorage(f"file://{path}")
    storage._fs.auto_mkdir = True  # stores have no folders to be made
    return storage


KINDS: dict[str, Callable[[Path], Any]] = {
    "folder": LocalStorage,
    "store in memory": lambda _: ObjectStorage(f"memory://bucket-{uuid.uuid4().hex}/run"),
    "store in files": store_in_files,
}
CASES = ["folder", "store in memory", pytest.param("store in files", marks=pytest.mark.full)]


def parts(step: int) -> dict[str, Any]:
    return {"part": {"x": torch.full((1000,), float(step))}, "step": step}


def gone() -> Exception:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def run_on(storage: Any, **settings: Any) -> Checkpointer:
    one = Checkpointer(CheckpointConfig(**{"asynchronous": False, "keep_last": 2, **settings}), "unused")
    one.storage = storage
    return one


def assert_all_whole(storage: Any) -> list[str]:
    names = sorted(storage.names())
    for name in names:
        index = open_verified(storage, name, "full")
        assert index.values["step"] == int(name[len("step_") :].partition(".")[0])
    return names


@pytest.mark.parametrize("kind", CASES)
def test_a_run_survives_a_storage_that_fails_now_and_then(tmp_path: Path, kind: str) -> None:
    for seed in range(3):
        inner, time = KINDS[kind](tmp_path / str(seed)), TestTime()
        one = run_on(limited(inner, random_faults(seed, 0.2, gone), 30, time))
        for step in (1, 2, 3):
            one.save(step, parts(step))
        assert time.pauses
        assert assert_all_whole(inner) == ["step_00000002", "step_00000003"]
        assert inner.pointed_at() == "step_00000003"
        state = parts(0)
        assert one.load_latest(state)["step"] == 3  # type: ignore[index]
        assert state["part"]["x"].unique().tolist() == [3.0]


@pytest.mark.parametrize("kind", CASES)
def test_no_failure_makes_half_a_checkpoint_visible(tmp_path: Path, kind: str) -> None:
    num_failed = 0
    for seed in range(8):
        inner, time = KINDS[kind](tmp_path / str(seed)), TestTime()
        one = run_on(limited(inner, random_faults(seed, 0.05, gone), 0, time), max_failed_saves=9)
        best = 0
        for step in (1, 2, 3, 4):
            one.save(step, parts(step))
            assert one.record is not None
            is_saved = one.record.total_seconds is not None
            num_failed += not is_saved
            best = step if is_saved else best
            steps = [int(name[5:13]) for name in assert_all_whole(inner)]
            assert best in steps or not best
    assert num_failed > 3


def test_each_failure_is_a_line_with_rank_operation_file_and_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = [gone(), gone()]

    def fault(operation: str, when: str) -> None:
        if (operation, when) == ("write", "inside") and left:
            raise left.pop()

    time = TestTime()
    run_on(limited(LocalStorage(tmp_path), fault, 3, time)).save(1, parts(1))
    first, second = [r.message for r in caplog.records if "attempt" in r.message]
    file = f"{tmp_path}/step_00000001/data-00000-0.safetensors"
    assert first.startswith(f"rank 0: write {file} failed, attempt 1 of 4; again in ")
    assert first.endswith(" s: OSError: [Errno 116] Stale file handle")
    assert "attempt 2 of 4" in second
    assert len(time.pauses) == 2
    assert 0.5 <= time.pauses[0] <= 1.5
    assert 1.0 <= time.pauses[1] <= 3.0
    assert assert_all_whole(LocalStorage(tmp_path)) == ["step_00000001"]


def test_an_error_that_stays_is_not_tried_again(tmp_path: Path) -> None:
    def full(operation: str, when: str) -> None:
        if (operation, when) == ("write", "inside"):
            raise OSError(errno.ENOSPC, "No space left on device")

    time = TestTime()
    with pytest.raises(CheckpointError, match="no space left"):
        run_on(limited(LocalStorage(tmp_path), full, 3, time)).save(1, parts(1))
    assert not time.pauses


class ClientError(Exception):
    """As a driver's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def unreadable(error: OSError) -> DamagedCheckpointError:
    damaged = DamagedCheckpointError("a/b", "cannot be read")
    damaged.__cause__ = error
    return damaged


@pytest.mark.parametrize(
    ("error", "on_files", "on_a_store"),
    [
        (OSError(errno.EIO, "Input/output error"), True, True),
        (ConnectionResetError("by peer"), True, True),
        (TimeoutError(), True, True),
        (unreadable(gone()), True, True),  # type: ignore[arg-type]
        (unreadable(FileNotFoundError(errno.ENOENT, "x")), False, False),
        (DamagedCheckpointError("a/b", "truncated"), False, False),
        (OSError(errno.ENOSPC, "No space left on device"), False, False),
        (PermissionError("denied"), False, False),
        (FileNotFoundError("x"), False, False),
        (OSError("of a driver"), False, True),
        (ClientError(503), False, True),
        (ClientError(429), False, True),
        (ClientError(403), False, False),
        (ValueError("a mistake"), False, False),
        (torch.OutOfMemoryError("no memory"), False, False),
        (HungStorageError("hangs"), False, False),
    ],
)
def test_which_errors_may_pass(error: Exception, on_files: bool, on_a_store: bool) -> None:
    assert may_pass(error, is_remote=False) is on_files
    assert may_pass(error, is_remote=True) is on_a_store


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("point", [("write", "inside"), ("commit", "before"), ("commit", "after")])
def test_a_save_that_hangs_is_given_up_by_name_and_what_it_does_later_is_whole(
    tmp_path: Path, kind: str, point: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    inner, time = KINDS[kind](tmp_path), TestTime()
    hang = Hang(time, *point)
    one = run_on(limited(inner, hang, 3, time), max_failed_saves=1)
    one.storage.inner.fault = lambda *_: None  # type: ignore[union-attr, assignment]
    one.save(1, parts(1))
    one.storage.inner.fault = hang  # type: ignore[union-attr, assignment]
    one.save(2, parts(2))
    what = "step_00000002" + ("/data-00000-0.safetensors" if point[0] == "write" else "")
    assert f"rank 0: {point[0]} {inner.root}/{what} has made no progress for 300 s" in caplog.text
    assert "training goes on" in caplog.text
    assert assert_all_whole(inner)[0] == "step_00000001"
    time.hung.clear()
    one.storage.inner.fault = lambda *_: None  # type: ignore[union-attr, assignment]
    one.save(2, parts(2))
    hang.go.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-storage":
            thread.join()
    names = assert_all_whole(inner)
    assert names[-1] == "step_00000002.2"
    # in a store, the next save has swept away what had no marker, and the marker alone is no checkpoint
    appears = {("commit", "before"): kind == "folder", ("commit", "after"): True}
    assert ("step_00000002" in names) == appears.get(point, False)


def test_a_slow_write_that_makes_progress_is_not_given_up(tmp_path: Path) -> None:
    time = TestTime()
    time.hung.set()  # every look finds that its time is over
    handed = []

    def slow(operation: str, when: str) -> None:
        if when == "inside":
            for _ in range(5):  # of ten
                time.looks.acquire()
            handed.append(operation)

    storage = limited(LocalStorage(tmp_path), slow, 0, time)
    LocalStorage(tmp_path).begin("ckpt")
    storage.write("ckpt", "file", lambda handle: [handle.write(b"12") for _ in range(10)])
    assert len(handed) == 10
    assert (tmp_path / ".saving-ckpt" / "file").read_bytes() == b"12" * 10


def test_a_load_that_hangs_is_named_and_no_older_checkpoint_is_taken(tmp_path: Path) -> None:
    time = TestTime()
    hang = Hang(time, "read_into", "before")
    one = run_on(LocalStorage(tmp_path))
    one.save(1, parts(1))
    one.save(2, parts(2))
    one.storage = limited(LocalStorage(tmp_path), hang, 3, time)
    with pytest.raises(CheckpointError, match=r"read .*/step_0000000./manifest.json has made no progress"):
        one.load_latest(parts(0))
    hang.go.set()


class Blind(LocalStorage):
    """The files of the other ranks are not there."""

    def written_size(self, name: str, file: str) -> int | None:
        return None if file.startswith("data-") else super().written_size(name, file)


def test_files_that_the_first_rank_does_not_see_never_become_visible(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be on storage that all ranks share"):
        run_on(Blind(tmp_path)).save(1, parts(1))
    assert LocalStorage(tmp_path).names() == []
    assert not list(tmp_path.glob(".saving-*"))


def test_a_store_that_does_not_answer_loses_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage = KINDS["store in memory"](tmp_path)
    run_on(storage).save(1, parts(1))
    with monkeypatch.context() as patch:
        patch.setattr(type(storage._fs), "info", lambda *_, **__: (_ for _ in ()).throw(gone()))
        for ask in (storage.names, storage.sweep, storage.tidy):
            with pytest.raises(OSError, match="Stale"):
                ask()
    assert storage.names() == ["step_00000001"]


def test_an_address_of_files_is_a_folder(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}")
    assert isinstance(storage.inner, LocalStorage)
    assert storage.root == str(tmp_path)


def test_limits_are_those_of_the_configuration(tmp_path: Path) -> None:
    one = Checkpointer(CheckpointConfig(retries=7, hang_seconds=20.0), tmp_path)
    assert isinstance(one.storage, LimitedStorage)
    assert (one.storage._limits.retries, one.storage._limits.hang_seconds) == (7, 20.0)
    with pytest.raises(ConfigError, match=r"checkpoint\.hang_seconds: expected less than 600"):
        CheckpointConfig(hang_seconds=600.0)


def test_without_a_time_limit_there_is_no_thread(tmp_path: Path) -> None:
    threads = []

    def fault(operation: str, when: str) -> None:
        threads.append(threading.current_thread())

    storage = LimitedStorage(Faulty(LocalStorage(tmp_path), fault), Limits(0, 0.0))  # type: ignore[arg-type]
    storage.names()
    assert set(threads) == {threading.current_thread()}
