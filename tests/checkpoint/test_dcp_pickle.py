"""The pickled metadata of a stock folder: what belongs there is read, everything else is refused unrun."""

import builtins
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from fsdmoe.checkpoint import CheckpointError, DamagedCheckpointError, from_dcp
from fsdmoe.checkpoint.dcp_pickle import read_metadata


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def attacks(touched: Path) -> dict[str, Any]:
    command = f"touch {touched}"
    return {
        f"{os.system.__module__}.system": Runs(os.system, command),
        "subprocess.check_call": Runs(subprocess.check_call, ["touch", str(touched)]),
        "builtins.eval": Runs(builtins.eval, f"open({str(touched)!r}, 'w')"),
        "builtins.getattr": Runs(getattr, "text", "upper"),
        "torch.serialization.load": Runs(torch.load, str(touched)),
        "torch.Tensor": torch.Tensor,
        "collections.Counter": Runs(__import__("collections").Counter),
    }


def places(attack: Any) -> list[Any]:
    """The attack as all of the file, and everywhere in metadata that looks right otherwise."""
    return [
        attack,
        Metadata({"a": attack}, None, {}),
        Metadata({"a": BytesStorageMetadata()}, attack, {}),
        Metadata({"a": BytesStorageMetadata()}, {"a": ("a",)}, {"x": attack}),
        Metadata({}, storage_meta=attack),
        [attack],
    ]


def test_a_hostile_pickle_runs_nothing_and_its_class_is_named(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for name, attack in attacks(touched).items():
        for protocol in (2, 4, 5):
            for place in places(attack):
                with pytest.raises(CheckpointError) as caught:
                    read_metadata(pickle.dumps(place, protocol, fix_imports=False), "step-1/.metadata")
                assert f"it asks for {name}," in str(caught.value)
                assert "nothing was run" in str(caught.value)
                assert not touched.exists()


def test_the_attacks_would_run_elsewhere(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    pickle.loads(pickle.dumps(attacks(touched)[f"{os.system.__module__}.system"]))
    assert touched.exists()


def test_a_hostile_file_in_a_folder_stops_the_import_before_anything_is_written(tmp_path: Path) -> None:
    folder, touched = tmp_path / "stock", tmp_path / "touched"
    dcp.save({"model": {"lm_head.weight": torch.ones(2, 2)}}, checkpoint_id=folder, no_dist=True)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.planner_data["x"] = Runs(os.system, f"touch {touched}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.system, which is no part"):
        from_dcp(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


def test_an_object_that_is_not_plain_data_is_refused_unrun(tmp_path: Path) -> None:
    folder, touched = tmp_path / "stock", tmp_path / "touched"
    weights = {"model": {"lm_head.weight": torch.ones(2, 2)}}
    dcp.save({**weights, "step": Runs(os.system, f"touch {touched}")}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointError, match=r"step is not plain data, and was not run: .*system"):
        from_dcp(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


@pytest.mark.parametrize(
    "data",
    [b"", b"not a pickle", pickle.dumps({}), pickle.dumps(torch.Size([1])), b"\x80\x04R.", b"\x80\x04\x95"],
)
def test_what_is_no_metadata_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"step-1/\.metadata"):
        read_metadata(data, "step-1/.metadata")


def test_every_truncation_of_a_real_file_is_damage(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2, 2)}, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpointError):
            read_metadata(data[:length], ".metadata")
    assert set(read_metadata(data, ".metadata").field("state_dict_metadata")) == {"model.w", "step"}
