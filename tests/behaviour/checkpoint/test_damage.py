"""Damage of every kind to every file: found, named, and passed over only where the user asked for the
latest."""

import contextlib
import json
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DamagedCheckpointError, LoadPolicy
from fsdmoe.checkpoint.format import FORMAT, manifest_bytes, parse_manifest
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.reader import open_checkpoint
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.testing import RankFailure, run_ranks


def tensors(fill: float | None = None) -> dict[str, torch.Tensor]:
    """About 3 MB, so that files have several blocks."""
    made = {"a": torch.arange(500_000.0), "b": torch.arange(300_000).to(torch.bfloat16), "c": torch.ones(7)}
    return made if fill is None else {key: torch.full_like(value, fill) for key, value in made.items()}


def save_one(folder: Path, name: str) -> Path:
    checkpoint.save(folder / name, part=tensors(), step=5)
    return folder / name


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_bit(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(at * len(data)))] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "emptied": empty,
    "removed": Path.unlink,
    "first byte": lambda path: flip_bit(path, 0.0),
    "some byte": lambda path: flip_bit(path, 0.37),
    "last byte": lambda path: flip_bit(path, 1.0),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


def save_on_ranks(folder: str) -> None:
    save_one(Path(folder), "ckpt")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two ranks, each its own file."""
    folder = tmp_path_factory.mktemp("good")
    run_ranks(save_on_ranks, 2, str(folder))
    return folder / "ckpt"


def use(folder: Path, how: str) -> None:
    if how == "load":
        checkpoint.load(folder, part=tensors(0.0))
    else:
        open_verified(LocalStorage(folder.parent), folder.name, "full")


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file_damaged_in_turn_is_named(good: Path, tmp_path: Path, kind: str) -> None:
    files = sorted(path.name for path in good.iterdir())
    data = ["data-00000-0.safetensors", "data-00001-0.safetensors"]
    assert files == [*data, "manifest.json", "metadata.json"]
    for file in files:
        for how in ("load", "verify"):
            copy = shutil.copytree(good, tmp_path / f"{file}-{how}")
            DAMAGE[kind](copy / file)
            with pytest.raises(CheckpointError) as caught:
                use(copy, how)
            # a folder without its manifest is no checkpoint at all; everything else is known by its file
            assert file in str(caught.value) or "no checkpoint here" in str(caught.value), (file, how)


def test_the_undamaged_one_loads(good: Path) -> None:
    state = tensors(0.0)
    assert checkpoint.load(good, part=state, step=0)["step"] == 5
    for key, value in tensors().items():
        assert torch.equal(state[key], value)


def test_the_latest_falls_back_to_the_last_good_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save_one(tmp_path, f"step_{step:08d}")
    flip_bit(tmp_path / "step_00000003/data-00000-0.safetensors", 0.9)
    (tmp_path / "step_00000002/metadata.json").unlink()
    state = tensors(0.0)
    assert checkpoint.load(tmp_path, part=state, step=0)["step"] == 5
    assert torch.equal(state["a"], tensors()["a"])
    assert "step_00000003/data-00000-0.safetensors" in caplog.text
    assert "step_00000002/metadata.json" in caplog.text
    with pytest.raises(DamagedCheckpointError, match="block"):
        checkpoint.load(tmp_path / "step_00000003", part=tensors(0.0))


def test_when_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    for step in (1, 2):
        truncate(save_one(tmp_path, f"step_{step:08d}") / "metadata.json")
    with pytest.raises(
        CheckpointError, match=r"(?s)every checkpoint is damaged.*step_00000002.*step_00000001"
    ):
        checkpoint.load(tmp_path, part=tensors(0.0))


def load_with_fallback(folder: str) -> int:
    return checkpoint.load(folder, part=tensors(0.0), step=0)["step"]


def test_ranks_fall_back_together_when_only_one_meets_the_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step_{step:08d}", part=tensors(), step=step)
    (tmp_path / "step_00000002/data-00000-0.safetensors").unlink()  # its size is checked by one of the ranks
    assert run_ranks(load_with_fallback, 2, str(tmp_path)) == [1, 1]
    with pytest.raises(RankFailure, match=r"data-00000-0\.safetensors"):
        run_ranks(load_with_fallback, 2, str(tmp_path / "step_00000002"))


def test_fast_verification_ignores_damage_in_what_is_not_loaded_and_full_finds_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", a=tensors(), z=torch.arange(4_000_000.0))
    path = tmp_path / "ckpt/data-00000-0.safetensors"
    flip_bit(path, 0.2)  # inside z, the larger one, which is written first
    checkpoint.load(tmp_path / "ckpt", a=tensors(0.0))
    with pytest.raises(DamagedCheckpointError, match=path.name):
        checkpoint.load(tmp_path / "ckpt", policy=LoadPolicy(verify="full"), a=tensors(0.0))
    with pytest.raises(DamagedCheckpointError, match=path.name):
        checkpoint.load(tmp_path / "ckpt", z=torch.zeros(4_000_000))


@pytest.mark.parametrize("what", ["nothing", "a file", "a torch checkpoint", "another manifest"])
def test_a_foreign_folder_is_refused(tmp_path: Path, what: str) -> None:
    if what == "a file":
        (tmp_path / "ckpt").write_text("x")
    elif what == "a torch checkpoint":
        torch.distributed.checkpoint.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    elif what == "another manifest":
        (tmp_path / "ckpt").mkdir()
        (tmp_path / "ckpt/manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(CheckpointError, match=r"no checkpoint here|not written by fsdmoe"):
        checkpoint.load(tmp_path / "ckpt", a=torch.zeros(2))


class Evil:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the metadata and make all checksums right again, as someone who knows the format would."""
    metadata = json.loads((folder / "metadata.json").read_text())
    change(metadata)
    data = json.dumps(metadata).encode()
    (folder / "metadata.json").write_bytes(data)
    files, serial, _ = parse_manifest((folder / "manifest.json").read_bytes(), "manifest.json")
    files["metadata.json"] = type(files["metadata.json"])(len(data), [zlib.crc32(data)])
    (folder / "manifest.json").write_bytes(manifest_bytes(files, serial))


def set_box(part: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(metadata: dict[str, Any]) -> None:
        metadata["tensors"]["part/a"]["boxes"][0][part] = value

    return change


def set_tensor(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata["tensors"]["part/a"].__setitem__(key, value)


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a file outside": lambda m: m.__setitem__("files", ["../../../etc/passwd"]),
    "an absolute file": lambda m: m.__setitem__("files", ["/etc/passwd"]),
    "a box past the end": set_box(3, 10**9),
    "a negative place": set_box(3, -8),
    "a misaligned place": set_box(3, 2049),
    "an unknown file number": set_box(2, 7),
    "a box that leaves the tensor": set_box(0, [5]),
    "a box that covers too little": set_box(1, [499_999]),
    "the same box twice": lambda m: m["tensors"]["part/a"]["boxes"].append(
        m["tensors"]["part/a"]["boxes"][0]
    ),
    "a code object as dtype": set_tensor("dtype", "os.system"),
    "a shape of text": set_tensor("shape", "boom"),
    "a huge shape": set_tensor("shape", [10**18]),
    "values that are a list": lambda m: m.__setitem__("values", []),
    "a version from the future": lambda m: m.__setitem__("version", 99),
    "another format": lambda m: m.__setitem__("format", "pickle"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_metadata_forged_with_right_checksums_is_refused(good: Path, tmp_path: Path, kind: str) -> None:
    copy = shutil.copytree(good, tmp_path / "ckpt")
    forge(copy, lambda metadata: None)
    checkpoint.load(copy, part=tensors(0.0))  # forging by itself is not what fails
    forge(copy, FORGERIES[kind])
    state = tensors(0.0)
    with pytest.raises(CheckpointError):
        checkpoint.load(copy, part=state)
    assert state["a"].abs().sum() == 0


def watch_unpickling(act: Callable[[], Any]) -> list[str]:
    """Names that an unpickler looked up, whoever started it."""
    seen: list[str] = []
    watching = [True]
    sys.addaudithook(
        lambda event, args: seen.append(str(args)) if watching[0] and "pickle" in event else None
    )
    try:
        act()
    finally:
        watching[0] = False
    return seen


def load_hostile(folder: str, trap: str) -> list[str]:
    """Load whatever is there; report what an unpickler did meanwhile."""
    calls: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        calls.append("an unpickler was called")
        raise AssertionError

    kept = pickle.loads, pickle.load, torch.load
    pickle.loads = pickle.load = torch.load = refuse  # type: ignore[assignment]

    def act() -> None:
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(CheckpointError):
                checkpoint.load(Path(folder) / name, part=tensors(0.0))

    try:
        return watch_unpickling(act) + calls
    finally:
        pickle.loads, pickle.load, torch.load = kept  # type: ignore[assignment]


def test_a_hostile_checkpoint_is_refused_and_nothing_of_it_runs(good: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    payload = pickle.dumps(Evil(trap))
    folder = tmp_path / "hostile"
    folder.mkdir()
    for file in ("manifest.json", "metadata.json", "data-00000-0.safetensors"):
        copy = shutil.copytree(good, folder / f"pickle-as-{file}")
        (copy / file).write_bytes(payload)
    copy = shutil.copytree(good, folder / "pickle-beside")
    for file in (".metadata", "data.pt", "data.pkl"):
        (copy / file).write_bytes(payload)
    torch.save(Evil(tmp_path / "other"), folder / "pickle-beside/model.bin")
    copy = shutil.copytree(good, folder / "pickle-as-value")
    forge(
        copy, lambda m: m["values"].update(step=payload.hex(), evil={"__reduce__": ["os.mkdir", [str(trap)]]})
    )
    copy = shutil.copytree(good, folder / "deep")
    (copy / "manifest.json").write_text('{"format": "' + FORMAT + '", "version": 1, "self": ' + "[" * 100_000)

    assert load_hostile(str(folder), str(trap)) == []
    for result in run_ranks(load_hostile, 2, str(folder), str(trap), fresh=True):
        assert result == []
    assert not trap.exists()
    assert not (tmp_path / "other").exists()
    pickle.loads(payload)  # the trap itself works
    assert trap.exists()


def test_a_half_written_save_is_invisible_and_removed_by_the_next_run(tmp_path: Path) -> None:
    save_one(tmp_path, "step_00000001")
    left = tmp_path / ".saving-step_00000002"
    shutil.copytree(tmp_path / "step_00000001", left)
    (left / "manifest.json").unlink()
    assert LocalStorage(tmp_path).names() == ["step_00000001"]
    assert checkpoint.load(tmp_path, part=tensors(0.0), step=0)["step"] == 5
    LocalStorage(tmp_path).tidy()
    assert not left.exists()


def test_a_replaced_checkpoint_comes_back_when_its_successor_never_arrived(tmp_path: Path) -> None:
    path = save_one(tmp_path, "ckpt")
    path.rename(tmp_path / ".replaced-ckpt")  # the crash came between the two renames
    assert checkpoint.load(path, part=tensors(0.0), step=0)["step"] == 5
    save_one(tmp_path, "ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]
    assert open_checkpoint(LocalStorage(tmp_path), "ckpt").values == {"step": 5}
