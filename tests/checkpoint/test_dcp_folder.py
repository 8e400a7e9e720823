"""Damaged and unusual stock folders: each is named, and nothing is written."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DamagedCheckpointError, from_dcp
from fsdmoe.checkpoint.dcp_folder import open_dcp_folder
from fsdmoe.checkpoint.storage import split_address

KEY = "model.lm_head.weight"


def stock(folder: Path) -> Path:
    state = {
        "model": {"lm_head.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4)},
        "optim": {"state": {}, "param_groups": []},
        "step": 3,
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def altered(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(folder: Path, words: str, kind: type[Exception] = CheckpointError) -> None:
    target = folder.parent / "out"
    with pytest.raises(kind, match=words):
        from_dcp(folder, target)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    folder = stock(tmp_path / "stock")
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    refused(
        folder,
        rf"stock/__0_0.distcp: truncated: {len(data) - 1} bytes of {len(data)}",
        DamagedCheckpointError,
    )
    (folder / "__0_0.distcp").unlink()
    refused(folder, r"stock/__0_0.distcp: missing", DamagedCheckpointError)
    (folder / ".metadata").unlink()
    refused(folder, r"not a torch.distributed.checkpoint folder: no .metadata")


def _grow(metadata: Any) -> None:
    metadata.state_dict_metadata[KEY].size = torch.Size([9, 4])


def _misplace(metadata: Any) -> None:
    metadata.state_dict_metadata[KEY].chunks[0].offsets = torch.Size([1, 0])


def _lose(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex(KEY, [0, 0])]


def _shorten(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(KEY, [0, 0])].length = 5


def _lead_out(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(KEY, [0, 0])].relative_path = "../secret"


def _transform(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(KEY, [0, 0])].transform_descriptors = ["zstd"]


def _negate(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(KEY, [0, 0])].offset = -1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_grow, "do not make up"),
        (_misplace, "has no place|leaves"),
        (_lose, "has no place in the files"),
        (_shorten, "5 bytes for a chunk"),
        (_lead_out, "outside its folder"),
        (_transform, "went through zstd"),
        (_negate, "expected a count"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    folder = stock(tmp_path / "stock")
    altered(folder, change)
    refused(folder, words)


def _other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata[KEY].properties.dtype = torch.int32


def test_a_chunk_that_is_not_what_the_metadata_says_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = stock(tmp_path / "stock")
    altered(folder, _other_dtype)
    refused(folder, r"expected \(8, 4\) torch.int32, got \(8, 4\) torch.float32", DamagedCheckpointError)


def test_an_object_that_is_larger_than_any_number_or_list_of_names_is_not_read(tmp_path: Path) -> None:
    state = {"model": {"lm_head.weight": torch.randn(8, 4)}, "step": "x" * (65 << 20)}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    refused(
        tmp_path / "stock", r"step: expected a number or names of at most 67108864 bytes, got an object of"
    )


def test_a_chunk_that_unpacks_to_more_than_its_bytes_is_not_read(tmp_path: Path) -> None:
    folder = stock(tmp_path / "stock")

    def pack(metadata: Any) -> None:
        stored = metadata.storage_data[MetadataIndex(KEY, torch.Size([0, 0]))]
        whole = (folder / stored.relative_path).read_bytes()
        plain = zipfile.ZipFile(io.BytesIO(whole[stored.offset : stored.offset + stored.length]))
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry in plain.infolist():
                archive.writestr(entry.filename, plain.read(entry))
            archive.writestr("archive/zeros", bytes(1 << 20))
        (folder / "__1_0.distcp").write_bytes(packed.getvalue())
        stored.relative_path, stored.offset, stored.length = "__1_0.distcp", 0, len(packed.getvalue())

    altered(folder, pack)
    refused(folder, rf"stock/__1_0.distcp: .*{KEY}: \d+ bytes unpack to \d+", DamagedCheckpointError)


def test_a_load_of_a_stock_folder_names_the_command(tmp_path: Path) -> None:
    folder = stock(tmp_path / "stock")
    with pytest.raises(CheckpointError, match=r"fsdmoe\.checkpoint from-dcp"):
        checkpoint.load(folder, torch.nn.Linear(2, 2))


def test_keys_without_the_planners_record_are_told_from_the_names(tmp_path: Path) -> None:
    for name, state in {
        "nested": {"model.model.norm.weight": torch.ones(3), "model.lm_head.weight": torch.ones(2, 3)},
        "bare": {"model.norm.weight": torch.ones(3), "lm_head.weight": torch.ones(2, 3)},
    }.items():
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        altered(tmp_path / name, lambda metadata: setattr(metadata, "planner_data", None))
        paths = open_dcp_folder(*split_address(tmp_path / name)).paths.values()
        assert {path[-1] for path in paths} == {"model.norm.weight", "lm_head.weight"}
