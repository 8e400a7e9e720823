"""A run's checkpoints: intervals, background saves, retention, what is resumed after which misfortune."""

import logging
import os
import resource
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fsdmoe import checkpoint
from fsdmoe.checkpoint import RUN_FOLDER, CheckpointConfig, Checkpointer, CheckpointError, staging
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.checkpoint_states import assert_same, whole_state


def parts(step: int, size: int = 1000) -> dict[str, Any]:
    return {"part": {"x": torch.full((size,), float(step))}, "step": step}


def names(folder: Path) -> list[str]:
    return sorted(LocalStorage(folder).names())


def saver(folder: Path, **settings: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(**{"asynchronous": False, "interval": 2, **settings}), folder)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_saves_at_the_interval_and_resumes_the_newest(tmp_path: Path, asynchronous: bool) -> None:
    one = saver(tmp_path, asynchronous=asynchronous)
    assert one.load(parts(0)) is None
    assert [step for step in range(1, 8) if one.maybe_save(step, lambda step=step: parts(step))] == [2, 4, 6]
    one.maybe_save(7, parts(7), is_last=True)
    one.close()
    assert names(tmp_path) == ["step_00000006", "step_00000007"]
    assert (tmp_path / "latest").read_text() == "step_00000007\n"
    state = parts(0)
    assert saver(tmp_path).load(state) == {"part": state["part"], "step": 7}
    assert state["part"]["x"][0] == 7


def test_only_the_end_and_signals_save_with_interval_zero(tmp_path: Path) -> None:
    one = saver(tmp_path, interval=0)
    assert not one.maybe_save(100, parts(100))
    assert one.maybe_save(100, parts(100), is_last=True)


def test_retention_keeps_the_last_and_every_mth(tmp_path: Path) -> None:
    one = saver(tmp_path, keep_last=2, keep_every=6)
    for step in range(2, 20, 2):
        one.maybe_save(step, parts(step))
    assert names(tmp_path) == ["step_00000006", "step_00000012", "step_00000016", "step_00000018"]


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(tmp_path: Path) -> None:
    one = saver(tmp_path, keep_last=2)
    for step in (2, 4):
        one.save(step, parts(step))
    max((tmp_path / "step_00000004").iterdir(), key=lambda file: file.stat().st_size).write_bytes(b"")
    again = saver(tmp_path, keep_last=2)
    assert again.load(parts(0))["step"] == 2  # type: ignore[index]
    again.save(6, parts(6))
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000006"]
    again.save(8, parts(8))
    assert names(tmp_path) == ["step_00000004", "step_00000006", "step_00000008"]


def test_a_manifest_that_cannot_be_read_is_named_and_never_older_than_what_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = saver(tmp_path, keep_last=3)
    for step in (2, 4, 6):
        one.save(step, parts(step))
    manifest = tmp_path / "step_00000006/manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:50])
    again = saver(tmp_path, keep_last=3)
    assert again.load(parts(0))["step"] == 4  # type: ignore[index]
    assert "step_00000006 is passed over" in caplog.text
    again.save(5, parts(5))
    assert names(tmp_path) == [f"step_0000000{step}" for step in (2, 4, 5, 6)]
    manifest.write_bytes(whole)
    assert saver(tmp_path).load(parts(0))["step"] == 5  # type: ignore[index]


def test_what_is_written_is_the_state_at_the_call_whatever_training_does_then(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True)
    state = {"part": {"x": torch.zeros(3_000_000)}, "values": {"list": [1]}}
    one.save(2, state)
    state["part"]["x"].fill_(9)
    state["values"]["list"].append(2)
    one.close()
    back = {"part": {"x": torch.ones(3_000_000)}, "values": {}}
    values = saver(tmp_path).load(back)
    assert values is not None
    assert values["values"] == {"list": [1]}
    assert back["part"]["x"].abs().max() == 0


@pytest.mark.parametrize(("interval", "taken"), [(2, 12_000_000), (0, 0), (-1, 0)])
def test_host_memory_is_taken_at_the_start_by_runs_that_save(
    tmp_path: Path, interval: int, taken: int
) -> None:
    config = CheckpointConfig(asynchronous=True, interval=interval)
    one = Checkpointer(config, tmp_path)
    one.load({"part": {"x": torch.zeros(3_000_000)}})
    assert one._stager.num_bytes == taken


class HeldStorage(LocalStorage):
    """Commits wait until they are let go; counts how many saves are under way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.writing = self.most = 0

    def begin(self, name: str) -> None:
        self.writing += 1
        self.most = max(self.most, self.writing)
        super().begin(name)

    def commit(self, name: str) -> None:
        assert self.go.wait(60)
        super().commit(name)
        self.writing -= 1


def test_the_loop_goes_on_while_one_save_is_written_and_the_next_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = saver(tmp_path, asynchronous=True)
    one.storage = storage = HeldStorage(tmp_path)
    one.save(2, parts(2))  # returns although nothing can be finished yet
    assert one.is_saving
    assert one.record is not None
    assert one.record.total_seconds is None
    assert names(tmp_path) == []
    assert not caplog.messages
    threading.Timer(0.2, storage.go.set).start()
    one.save(4, parts(4))
    assert storage.go.is_set()
    assert one.record.stall_seconds > 0.1, "what it waited for the first one counts"
    one.close()
    for name, message in zip(names(tmp_path), caplog.messages, strict=True):
        assert message.startswith(f"saved {tmp_path}/{name} in ")
    assert not one.is_saving
    assert storage.most == 1
    assert names(tmp_path) == ["step_00000002", "step_00000004"]
    assert one.record.total_seconds is not None


def test_a_run_that_was_set_back_resumes_its_own_newest_not_an_abandoned_future(tmp_path: Path) -> None:
    one = saver(tmp_path, keep_last=10)
    for step in (2, 4, 6):
        one.save(step, parts(step))
    again = saver(tmp_path, keep_last=10, load=str(tmp_path / "step_00000002"))
    assert again.load(parts(0))["step"] == 2  # type: ignore[index]
    again.save(4, parts(40))
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000004.2", "step_00000006"]
    state = parts(0)
    saver(tmp_path).load(state)
    assert state["part"]["x"][0] == 40


def test_a_rollback_takes_checkpoints_of_this_course_of_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")  # relative, as in most configurations

    def parts(step: int) -> dict[str, Any]:
        return {"step": step, "model": {"x": torch.full((4,), float(step))}}

    one = saver(run, keep_last=10)
    for step in (2, 4, 6):
        one.save(step, parts(step))
    set_back = saver(run, keep_last=10, load="run/step_00000004")
    set_back.load(parts(0))
    assert set_back.go_back(parts(0))["step"] == 4  # type: ignore[index]
    set_back.save(5, parts(5))
    assert set_back.go_back(parts(0))["step"] == 5  # type: ignore[index]
    assert saver(run).load(parts(0))["step"] == 5  # type: ignore[index]
    for load, only_model in (("none", False), ("latest", True), ("run/step_00000002", True)):
        other = saver(run, keep_last=10, load=load, load_only_model=only_model)
        other.load(parts(0))
        assert other.go_back(parts(0)) is None, load
    other = saver(run, keep_last=10, load="none")
    other.load(parts(0))
    other.save(1, parts(1))
    assert other.go_back(parts(0))["step"] == 1  # type: ignore[index]


@pytest.mark.parametrize("load", ["none", "run/checkpoints/step_00000002", "latest", "run"])
def test_ranks_that_their_launcher_starts_again_go_on_with_what_they_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, only_model = Path("run/checkpoints"), load in ("latest", "run")

    def start(agent: str = "one", name: str = "") -> tuple[Checkpointer, dict[str, Any]]:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "somewhere")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setattr("fsdmoe.core.failures.began", lambda pid: agent)
        one = saver(folder, keep_last=10, load=load, load_only_model=only_model)
        state = {"step": 0, "model": {"x": torch.zeros(4)}, "optim": {"m": torch.zeros(4)}}
        there = one.will_load()
        assert (one.load(state) is not None) == there
        return one, state

    def save(one: Checkpointer, step: int) -> None:
        value = torch.full((4,), float(step))
        one.save(step, {"step": step, "model": {"x": value}, "optim": {"m": value}})

    for step in (2, 4):
        save(saver(folder, keep_last=10), step)
    first, state = start()
    begun = float(state["model"]["x"][0])
    assert begun == {"none": 0, "run/checkpoints/step_00000002": 2}.get(load, 4)
    _, state = start()  # lost before its first save: nothing to go on with
    assert state["model"]["x"][0] == begun
    assert (state["optim"]["m"][0] == 0) == (begun != 2)
    save(first, 3)
    _, state = start()
    assert state["model"]["x"][0] == 3 == state["optim"]["m"][0]
    if load == "none":
        first.end_course()
        assert start()[1]["model"]["x"][0] == 0  # it is finished: the command means a new one
        first.end_course()
    again, state = start(agent="two")  # by hand: as the command says
    assert state["model"]["x"][0] == (3 if only_model else begun)
    assert state["optim"]["m"][0] != 3
    save(again, 1)
    _, state = start(agent="two")
    assert state["model"]["x"][0] == 1 == state["optim"]["m"][0]
    assert again.go_back({"step": 0, "model": {"x": torch.zeros(4)}, "optim": {"m": torch.zeros(4)}})
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    _, state = start(agent="three")  # without a name, this is another launch
    assert state["model"]["x"][0] == (1 if only_model else begun)


def started_in_turn(folder: str, in_memory: int) -> list[int | None]:
    """What four starts of one launch go on with, of which the first two save."""
    os.environ |= {"TORCHELASTIC_ERROR_FILE": "somewhere", "TORCHELASTIC_RUN_ID": "job 7"}
    found = []
    for step, words in ((2, {}), (4, {}), (0, {}), (0, {"load": "latest", "load_only_model": True})):
        settings = {"load": "none", "interval": 100 if in_memory else 2, "asynchronous": False, **words}
        one = Checkpointer(CheckpointConfig(**settings, in_memory=in_memory), Path(folder) / "checkpoints")
        loaded = one.load({"step": 0, "model": {"x": torch.zeros(8)}})
        found.append(None if loaded is None else loaded.get("step", 0))
        if step:
            one.maybe_save(step, {"step": step, "model": {"x": torch.full((8,), float(step))}})
        one.join()
    return found


@pytest.mark.parametrize("in_memory", [0, 1])
def test_restarts_go_on_alike_on_all_ranks(tmp_path: Path, in_memory: int) -> None:
    """With copies in memory too; other words are another course."""
    found = run_ranks(started_in_turn, 2, str(tmp_path), in_memory, fresh=True)
    assert found == [[None, 2, 4, None if in_memory else 0]] * 2


def test_an_evaluation_looks_at_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "somewhere")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    folder = tmp_path / "checkpoints"
    config = CheckpointConfig(asynchronous=False, load=str(folder / "step_00000002"))
    saver(folder).save(2, parts(2))
    run = Checkpointer(config, folder)
    run.load(parts(0))
    run.save(4, parts(4))
    looking = Checkpointer(replace(config, interval=-1), folder)
    assert looking.load_only(parts(0), is_optional=False)["step"] == 2  # type: ignore[index]
    assert Checkpointer(config, folder).load(parts(0))["step"] == 4  # type: ignore[index]


def test_a_job_that_is_requeued_or_moves_goes_on_with_what_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "somewhere")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    one = saver(tmp_path / "checkpoints", load="none")
    assert one.load(parts(0)) is None
    one.save(2, parts(2))
    for name, changed in (("socket.gethostname", "another"), ("fsdmoe.core.failures.began", "later")):
        monkeypatch.setattr(name, lambda *_, changed=changed: changed)
        assert saver(tmp_path / "checkpoints", load="none").load(parts(0))["step"] == 2  # type: ignore[index]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
    assert saver(tmp_path / "checkpoints", load="none").load(parts(0)) is None


def test_a_crash_before_the_pointer_costs_nothing(tmp_path: Path) -> None:
    one = saver(tmp_path)
    one.save(2, parts(2))
    one.save(4, parts(4))
    (tmp_path / "latest").write_text("step_00000002\n")  # as if the pointer had not been moved yet
    assert saver(tmp_path).load(parts(0))["step"] == 4  # type: ignore[index]
    (tmp_path / "latest").unlink()
    assert saver(tmp_path).load(parts(0))["step"] == 4  # type: ignore[index]


def test_the_words_of_checkpoint_load(tmp_path: Path) -> None:
    saver(tmp_path / "a").save(2, parts(2))
    assert saver(tmp_path / "a", load="none").load(parts(0)) is None
    assert saver(tmp_path / "b", load=str(tmp_path / "a")).load(parts(0))["step"] == 2  # type: ignore[index]
    assert saver(tmp_path / "b", load=str(tmp_path / "a/latest")).load(parts(0))["step"] == 2  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"checkpoint\.load = .*nowhere: no checkpoint here"):
        saver(tmp_path / "b", load=str(tmp_path / "nowhere")).load(parts(0))


def test_a_damaged_checkpoint_is_named_with_the_fix_in_the_first_line(tmp_path: Path) -> None:
    saver(tmp_path / "a").save(2, parts(2))
    (file,) = (tmp_path / "a").rglob("step_*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    for load, said in (
        (file.parent, "damaged checkpoint: "),
        (tmp_path / "a", "every checkpoint is damaged"),
    ):
        with pytest.raises(CheckpointError) as caught:
            saver(tmp_path / "b", load=str(load)).load(parts(0))
        first = str(caught.value).partition("\n")[0]
        assert first.startswith(f"checkpoint.load = {load}: ")
        assert said in first
        assert "; name another one in checkpoint.load, or set it to none to start anew" in first


def test_a_run_from_scratch_says_which_checkpoints_it_will_delete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"load": "none", "keep_every": 4}
    before = saver(tmp_path, keep_last=3, **settings)
    before.load(parts(0))
    assert caplog.text == "", "there are none yet"
    for step in (2, 4, 6):
        before.save(step, parts(step))
    anew = saver(tmp_path, **settings)
    anew.load(parts(0))
    assert "another train.output_dir" in caplog.text
    named = {name for name in names(tmp_path) if name in caplog.text}
    assert named == {"step_00000002", "step_00000006"}, "step 4 is kept for good"
    for step in (3, 5):
        anew.save(step, parts(step))
    assert names(tmp_path) == ["step_00000003", "step_00000004", "step_00000005"]


def test_a_restarted_run_goes_on_from_its_own_newest_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver(tmp_path / "other").save(2, parts(2))
    start = {"load": str(tmp_path / "other/step_00000002")}
    assert saver(tmp_path / "run", **start).load(parts(0))["step"] == 2  # type: ignore[index]
    saver(tmp_path / "run", **start).save(9, parts(9))
    assert saver(tmp_path / "run", **start).load(parts(0))["step"] == 9  # type: ignore[index]
    assert "has checkpoints of its own by now; resuming those" in caplog.text


def test_a_run_that_names_its_own_folder_resumes_its_newest_as_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run/checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        saver(run, load=str(run)).load(parts(0))
    model = torch.nn.Linear(2, 2)
    saver(run).save(3, {"model": model, **parts(3)})
    for own in (run, run.parent):
        assert saver(run, load=str(own)).load(parts(0))["step"] == 3  # type: ignore[index]
        only = saver(run, load=str(own), load_only_model=True)
        assert only.load({"model": torch.nn.Linear(2, 2), **parts(0)}) == {}
    assert "checkpoints of its own" not in caplog.text


def test_a_hugging_face_folder_needs_the_word_that_only_the_model_is_meant(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "qwen3_moe"}')
    save_file({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}, tmp_path / "hf/model.safetensors")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"set checkpoint\.load_only_model = true"):
        saver(tmp_path / "run", load=str(tmp_path / "hf")).load({"model": model, **parts(0)})
    only = saver(tmp_path / "run", load=str(tmp_path / "hf"), load_only_model=True)
    assert only.load({"model": model, **parts(0)}) == {}
    assert model.weight[0, 0] == 3


def test_only_the_model_is_taken_on_request(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    saver(tmp_path).save(2, {"model": model, **parts(2)})
    other = torch.nn.Linear(2, 2)
    got = saver(tmp_path, load_only_model=True).load({"model": other, **parts(0)})
    assert got == {}
    assert torch.equal(other.weight, model.weight)


class FullStorage(LocalStorage):
    """A disk that fills up in the middle of a file, as long as told."""

    full = False

    def create(self, name: str, file: str) -> Any:
        manager = super().create(name, file)
        if not FullStorage.full:
            return manager

        class Filling:
            def __enter__(self) -> Any:
                manager.__enter__().write(b"half")
                raise OSError(28, "No space left on device")

            def __exit__(self, *_: object) -> None: ...

        return Filling()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_the_new_checkpoint_only(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = saver(tmp_path, asynchronous=asynchronous, keep_last=1, max_failed_saves=1)
    one.storage = FullStorage(tmp_path)
    one.save(2, parts(2))
    one.wait()
    FullStorage.full = True
    try:
        one.save(4, parts(4))  # reported, and forgiven once
        one.join()
        assert "train.output_dir: no space left in" in caplog.text, "when it happens, not at the next save"
        one.wait()
        with pytest.raises(CheckpointError, match=r"for step_00000006 \(.* KiB of this rank, .* free\)"):
            save_and_wait(one, 6)
    finally:
        FullStorage.full = False
    assert names(tmp_path) == ["step_00000002"]
    assert not list(tmp_path.glob(".saving-*"))
    assert saver(tmp_path).load(parts(0))["step"] == 2  # type: ignore[index]
    one.save(8, parts(8))
    one.close()
    assert names(tmp_path) == ["step_00000008"]


def test_the_save_after_a_failed_one_is_made(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True)
    one.storage = FullStorage(tmp_path)
    for last, step in enumerate((2, 6)):
        FullStorage.full = True
        one.save(step, parts(step))
        one.join()
        FullStorage.full = False
        if last:  # the run ends here in any case
            one.save(step + 2, parts(step + 2), in_background=False)
        else:
            with pytest.raises(CheckpointError, match="no space left"):
                one.save(step + 2, parts(step + 2))
        assert names(tmp_path)[-1] == f"step_{step + 2:08d}"
    one.close()


def test_folders_of_other_names_are_neither_resumed_nor_deleted(tmp_path: Path) -> None:
    one = saver(tmp_path, keep_last=1)
    save_and_wait(one, 2)
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "best")
    checkpoint.save(tmp_path / "base", step=99)  # newer than all
    assert saver(tmp_path).load(parts(0))["step"] == 2  # type: ignore[index]
    save_and_wait(one, 4)
    one.close()
    assert names(tmp_path) == ["base", "best", "step_00000004"]


def save_and_wait(one: Checkpointer, step: int) -> None:
    one.save(step, parts(step))
    one.wait()


def limit_file_size(folder: str) -> str:
    """A real write error on one rank of two, in the middle of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    one = Checkpointer(CheckpointConfig(asynchronous=True), folder)
    one.save(2, {"part": {"x": torch.zeros(100_000)}})
    one.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        one.save(4, {"part": {f"x{n}": torch.zeros(100_000) for n in range(4)}})
        with pytest.raises(CheckpointError) as caught:
            one.wait()
        one.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(caught.value)


def test_a_write_error_on_one_rank_is_everyones_and_loses_nothing(tmp_path: Path) -> None:
    for message in run_ranks(limit_file_size, 2, str(tmp_path)):
        assert "File too large" in message
        assert "rank 1" in message
        assert message.startswith("train.output_dir: ")
        assert message.endswith("(ulimit -f), or name another checkpoint.folder")
    assert names(tmp_path) == ["step_00000002"]
    assert not list(tmp_path.glob(".saving-*"))


def test_too_little_space_is_reported_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saver(tmp_path)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 100)
    with pytest.raises(
        CheckpointError,
        match=r"^train\.output_dir: .*not enough space: rank 0 needs .* name another checkpoint\.folder$",
    ):
        one.save(2, parts(2))


def save_in_background(folder: str, degrees: dict[str, int]) -> tuple[int, int, list[str]]:
    """Three saves under HSDP while the main thread keeps the default group busy; then load."""
    meshes = build_meshes(**degrees)
    one = Checkpointer(CheckpointConfig(keep_last=2, interval=1), folder, meshes=meshes)
    staged = []
    for step in (1, 2, 3):
        state = whole_state(meshes)
        one.save(step, state)
        assert one.record is not None
        staged.append(one.record.num_bytes)
        # Training's own collectives: the save would hang, or mix with them, if it used their group.
        while any_saving(one):
            pass
    one.close()
    back = whole_state(meshes, filled=False)
    loaded = Checkpointer(CheckpointConfig(asynchronous=False), folder, meshes=meshes).load(back)
    assert loaded is not None
    assert_same(loaded)
    return staged[0], staged[2], sorted(os.listdir(folder))


def any_saving(one: Checkpointer) -> bool:
    flag = torch.tensor([float(one.is_saving)])
    dist.all_reduce(flag)
    return bool(flag.item())


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(2, {"dp_outer": 2}), pytest.param(4, {"dp_outer": 2, "ep": 2}, marks=pytest.mark.full)],
)
def test_background_saves_have_a_group_of_their_own_and_stage_only_what_they_write(
    tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    results = run_ranks(save_in_background, ranks, str(tmp_path), degrees)
    for first, later, listing in results:
        assert listing == ["latest", "step_00000002", "step_00000003"]
        assert later <= first
    assert sum(later for _, later, _ in results) < 0.75 * sum(first for first, _, _ in results)


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True)
    one.save(2, parts(2))
    one.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"interval": -2}, "interval"),
        ({"keep_last": 0}, "keep_last"),
        ({"threads": 0}, "threads"),
        ({"load": ""}, "load"),
        ({"load": "none", "load_only_model": True}, "load_only_model"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^checkpoint\.{key}: "):
        CheckpointConfig(**settings)


def test_what_changed_since_the_save_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = CheckpointConfig(asynchronous=False)
    run = {"train": {"global_batch_size": 8, "seed": 0}, "data": {"seq_len": 32}}
    Checkpointer(settings, tmp_path, about=run).save(2, parts(2))
    changed = {"train": {"global_batch_size": 16, "seed": 0}, "data": {"seq_len": 32}, "new": 1}
    with caplog.at_level(logging.INFO):
        Checkpointer(settings, tmp_path, about=changed).load(parts(0))
    lines = [r.message for r in caplog.records if "changed since" in r.message]
    assert lines == ["changed since it was saved: train.global_batch_size 8 -> 16"]


def test_saves_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = saver(tmp_path)
    with caplog.at_level(logging.INFO):
        one.save(2, parts(2))
    assert one.record is not None
    assert one.record.stall_seconds == one.record.total_seconds, "training waits for all of it"
    (message,) = caplog.messages
    seconds = f"{one.record.stall_seconds:.1f}"
    where = tmp_path / "step_00000002"
    assert message == f"saved {where} in {seconds} s; training waited {seconds} s for it"


def test_the_last_save_is_not_in_the_background_and_takes_no_copy(tmp_path: Path) -> None:
    one = saver(tmp_path, asynchronous=True, interval=0)
    one.load(parts(0))
    one.maybe_save(3, parts(3), is_last=True)
    assert not one.is_saving
    assert one._stager.num_bytes == 0
    assert names(tmp_path) == ["step_00000003"]


def test_without_host_memory_for_a_copy_training_waits_for_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staging, "available_host_bytes", lambda: 1)
    one = saver(tmp_path, asynchronous=True)
    one.load(parts(0))
    one.maybe_save(2, parts(2))
    assert not one.is_saving
    assert names(tmp_path) == ["step_00000002"]
    assert one._stager.num_bytes == 0
    assert "checkpoint.asynchronous: training will wait for saves: a copy of the state takes" in caplog.text
    assert caplog.text.count("training will wait") == 1


def test_a_runs_folder_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = saver(run / RUN_FOLDER)
    for step in (2, 4):
        one.maybe_save(step, parts(step))
    state = parts(0)
    other = saver(tmp_path / "other", load=str(run))
    assert other.load(state) == {"part": state["part"], "step": 4}
    assert state["part"]["x"][0] == 4


def _short_on_one_rank(folder: str) -> tuple[bool, list[str]]:
    one = saver(Path(folder), asynchronous=True)
    with mock.patch.object(staging, "available_host_bytes", return_value=dist.get_rank() << 40):
        one.load(parts(0))
        one.maybe_save(2, parts(2))
    is_saving = one.is_saving
    one.close()
    return is_saving, names(Path(folder))


def test_one_host_without_memory_makes_all_ranks_wait(tmp_path: Path) -> None:
    assert run_ranks(_short_on_one_rank, 2, str(tmp_path)) == [(False, ["step_00000002"])] * 2
