"""Copies of a run's state in host memory: what is resumed after a lost host, a kill or a damaged file."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdmoe.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, memory_copies, node_memory
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.checkpoint_states import assert_same, whole_state


def parts(step: int) -> dict[str, Any]:
    return {"part": {"x": torch.full((1000,), float(step))}, "step": step}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the host's memory."""
    monkeypatch.setattr(node_memory, "ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def start(folder: Path, **settings: Any) -> tuple[Checkpointer, int | None]:
    """A start of a run in the folder, and the step that it goes on from."""
    one = Checkpointer(CheckpointConfig(**{"interval": 100, "in_memory": 1, **settings}), folder / "run")
    state = parts(-1)
    loaded = one.load(state)
    assert loaded is None or state["part"]["x"][0] == loaded["step"]
    return one, None if loaded is None else loaded["step"]


def run_until(step: int, folder: Path, **settings: Any) -> Checkpointer:
    """A run that takes these steps and is left as a kill would leave it between two of them."""
    one, begun = start(folder, **settings)
    for number in range((begun or 0) + 1, step + 1):
        one.maybe_save(number, parts(number))
    one.wait()
    return one


def copies_in(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.glob("*/*/node-*/step_*"))


def test_a_run_that_was_killed_goes_on_from_its_last_copy(tmp_path: Path, memory: Path) -> None:
    run_until(7, tmp_path)
    assert copies_in(memory) == ["step_00000006", "step_00000007"]
    assert start(tmp_path)[1] == 7
    assert copies_in(memory) == ["step_00000007"]


def test_the_newer_of_copy_and_checkpoint_is_resumed(tmp_path: Path) -> None:
    run_until(7, tmp_path, interval=5)
    assert start(tmp_path)[1] == 7
    assert start(tmp_path, in_memory=0)[1] == 5
    run_until(10, tmp_path, interval=5, in_memory=4)
    assert start(tmp_path)[1] == 10


def test_nothing_is_left_in_memory_when_a_run_ends(tmp_path: Path, memory: Path) -> None:
    one = run_until(3, tmp_path)
    one.maybe_save(4, parts(4), is_last=True)
    one.close()
    assert not list(memory.iterdir())
    assert start(tmp_path)[1] == 4


@pytest.mark.parametrize("how", ["none", "deleted", "set back"])
def test_copies_of_another_course_of_the_run_are_refused(tmp_path: Path, memory: Path, how: str) -> None:
    run_until(7, tmp_path, interval=5)
    if how == "deleted":
        (tmp_path / "run").rename(tmp_path / "gone")
    load = {"none": "none", "set back": str(tmp_path / "run" / "step_00000005")}.get(how, "latest")
    assert start(tmp_path, load=load)[1] == (5 if how == "set back" else None)
    assert copies_in(memory) == []
    assert start(tmp_path)[1] == (None if how == "deleted" else 5)


@pytest.mark.parametrize("text", ["", "../..", "a1b2"])
def test_an_id_that_is_none_names_no_folder(tmp_path: Path, memory: Path, text: str) -> None:
    """Else the folder above would be taken for that of the run, and the files of others for its rest."""
    run_until(2, tmp_path)
    (memory / "of_another_program").mkdir()
    (tmp_path / "run" / "copies_id").write_text(text)
    assert start(tmp_path)[1] is None
    assert copies_in(memory) == []
    assert (memory / "of_another_program").is_dir()


def test_a_kill_while_a_copy_is_written_costs_that_copy_only(tmp_path: Path) -> None:
    one = run_until(3, tmp_path)
    with mock.patch.object(memory_copies, "write_documents", side_effect=OSError("killed here")):
        one.maybe_save(4, parts(4))
        one.join()
    assert start(tmp_path)[1] == 3


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_a_damaged_copy_is_passed_over(tmp_path: Path, memory: Path, damage: str) -> None:
    run_until(7, tmp_path)
    (file,) = memory.glob("*/*/node-*/step_00000007/data-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if damage == "flipped" else data[:-1])
    assert start(tmp_path)[1] == 6


def test_a_run_whose_copies_are_all_damaged_says_so_once_and_starts_anew(
    tmp_path: Path, memory: Path
) -> None:
    run_until(7, tmp_path)
    for file in memory.glob("*/*/node-*/step_*/data-*"):
        file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(CheckpointError, match="damaged, and were removed"):
        start(tmp_path)
    assert start(tmp_path)[1] is None


def test_a_run_that_goes_back_forgets_what_it_did_since(tmp_path: Path) -> None:
    one = run_until(7, tmp_path, interval=5)
    state = parts(-1)
    back = one.go_back(state)
    assert back is not None
    assert back["step"] == 5
    assert start(tmp_path)[1] == 5


def test_copies_from_before_a_start_without_them_are_not_resumed(tmp_path: Path) -> None:
    run_until(7, tmp_path, interval=5)
    one, begun = start(tmp_path, in_memory=0)
    assert begun == 5
    one.maybe_save(6, parts(6), is_last=True)
    one.close()
    assert start(tmp_path)[1] == 6


def test_copies_on_hosts_that_a_start_did_not_have_are_not_resumed(tmp_path: Path, memory: Path) -> None:
    run_until(7, tmp_path, interval=5)
    memory.rename(tmp_path / "other hosts")
    memory.mkdir()
    run_until(6, tmp_path, interval=100)  # on from step 5, another course than that to step 7
    shutil.rmtree(memory)
    (tmp_path / "other hosts").rename(memory)
    assert start(tmp_path)[1] == 5


def test_a_copy_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = run_until(3, tmp_path)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 100)
    one.maybe_save(4, parts(4))
    one.wait()
    assert "not enough space" in caplog.text
    monkeypatch.undo()


def test_too_little_memory_is_refused_at_the_start_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copies, "available_host_bytes", lambda: 1000)
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.in_memory: expected memory .* got 1,000 bytes.*--shm-size"
    ):
        start(tmp_path)


def test_copies_without_any_save_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.in_memory: .*interval = -1"):
        CheckpointConfig(in_memory=1, interval=-1)


def test_each_rank_has_its_copy_on_the_next_node() -> None:
    nodes = object.__new__(node_memory.Nodes)
    nodes.ranks = [[0, 1], [2, 3], [4]]
    assert [nodes.target(rank) for rank in range(5)] == [2, 3, 4, 4, 0]
    assert [nodes.sources(rank) for rank in range(5)] == [[4], [], [0], [1], [2, 3]]
    nodes.ranks = [[0, 1]]
    assert nodes.target(1) is None


def copy_on_hosts(folder: str, hosts: list[int], ep: int, makes: bool) -> Any:
    """Ranks on hosts of their own make a copy, or load one."""
    root = Path(folder) / f"host{hosts[dist.get_rank()]}"
    root.mkdir(exist_ok=True)
    with mock.patch.object(node_memory, "ROOT", root):
        meshes = build_meshes(ep=ep)
        config = CheckpointConfig(interval=100, in_memory=1)
        one = Checkpointer(config, f"{folder}/run", meshes=meshes)
        if makes:
            state = whole_state(meshes)
            one.load(state)
            one.maybe_save(1, state)
            one.maybe_save(2, state)
            one.wait()
            return one.card["copies"]
        back = whole_state(meshes, filled=False)
        loaded = one.load(back)
        assert loaded is not None
        assert_same(loaded)
        return copies_in(root)


def test_any_host_may_be_lost_and_fewer_ranks_go_on(tmp_path: Path) -> None:
    """Three hosts of one rank; host 1 is lost, and a new one takes part in the end."""
    card = run_ranks(copy_on_hosts, 3, str(tmp_path), [0, 1, 2], 1, True)
    assert "for rank 2 of another node" in card[0]
    (tmp_path / "host1").rename(tmp_path / "lost")
    kept = run_ranks(copy_on_hosts, 2, str(tmp_path), [0, 2], 2, False)
    assert kept == [["step_00000002"]] * 2
    run_ranks(copy_on_hosts, 3, str(tmp_path), [5, 0, 2], 1, False)
