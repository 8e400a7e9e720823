"""Object stores have no rename: a checkpoint counts once its marker is there, and never before."""

import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.hf_export import ExportPolicy
from fsdmoe.checkpoint.storage import open_storage, read_file
from fsdmoe.models import Decoder
from tests.support.hf_pairs import tiny


@pytest.fixture
def bucket() -> str:
    return f"memory://bucket-{uuid.uuid4().hex}/run"


def test_a_run_lives_in_an_object_store(bucket: str) -> None:
    one = Checkpointer(CheckpointConfig(folder=bucket, interval=1, keep_last=2), "unused")
    assert one.load({"x": torch.zeros(3)}) is None
    for step in (1, 2, 3):
        one.save(step, {"x": torch.full((3,), float(step)), "step": step})
    one.close()
    assert sorted(one.storage.names()) == ["step_00000002", "step_00000003"]
    assert one.storage.pointed_at() == "step_00000003"
    x = torch.zeros(3)
    assert checkpoint.load(bucket, x=x, step=0)["step"] == 3
    assert x.tolist() == [3, 3, 3]
    assert checkpoint.load(f"{bucket}/step_00000002", step=0)["step"] == 2


def test_without_the_marker_it_is_not_there_and_the_next_writer_sweeps_it_away(bucket: str) -> None:
    storage, fs = open_storage(bucket), fsspec.filesystem("memory")
    for step in (1, 2):
        checkpoint.save(f"{bucket}/step_{step:08d}", step=step, x=torch.ones(1))
    path = bucket.removeprefix("memory://")
    fs.rm_file(f"/{path}/step_00000002/COMMITTED")
    assert storage.names() == ["step_00000001"]
    assert checkpoint.load(bucket, step=0)["step"] == 1
    fs.pipe_file(f"/{path}/photos/cat.jpg", b"not ours")
    storage.tidy()
    assert not fs.exists(f"/{path}/step_00000002")
    assert fs.exists(f"/{path}/photos/cat.jpg")


def test_a_checkpoint_that_was_copied_here_is_there_and_one_on_its_way_stays(
    bucket: str, tmp_path: Path
) -> None:
    for step in (7, 8):
        checkpoint.save(tmp_path / f"step_{step:08d}", step=step, x=torch.ones(1))
    fs, path = fsspec.filesystem("memory"), bucket.removeprefix("memory://")
    fs.put(f"{tmp_path}/step_00000007/", f"/{path}/step_00000007/", recursive=True)
    half, rest = sorted(file.name for file in (tmp_path / "step_00000008").iterdir())[:2], "metadata.json"
    for file in half:
        fs.put(f"{tmp_path}/step_00000008/{file}", f"/{path}/step_00000008/{file}")
    storage = open_storage(bucket)
    storage.tidy()
    assert storage.names() == ["step_00000007"]
    assert checkpoint.load(bucket, step=0)["step"] == 7
    fs.put(f"{tmp_path}/step_00000008/{rest}", f"/{path}/step_00000008/{rest}")
    assert sorted(storage.names()) == ["step_00000007", "step_00000008"]
    storage.delete("step_00000007")
    assert storage.names() == ["step_00000008"]


def test_a_whole_checkpoint_is_not_overwritten(bucket: str) -> None:
    checkpoint.save(f"{bucket}/ckpt", step=1)
    with pytest.raises(CheckpointError, match="exists"):
        checkpoint.save(f"{bucket}/ckpt", step=2)
    assert checkpoint.load(f"{bucket}/ckpt", step=0)["step"] == 1


def test_a_model_is_exported_with_the_files_beside_it(bucket: str, tmp_path: Path) -> None:
    checkpoint.save(f"{bucket}/ckpt", Decoder(tiny("qwen3_moe")))
    for name in ("tokenizer_config.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    checkpoint.to_hf(f"{bucket}/ckpt", f"{bucket}/hf", ExportPolicy(files_from=str(tmp_path)))
    storage = open_storage(bucket)
    assert read_file(storage, "hf", "tokenizer_config.json") == b"{}"
    assert len(read_file(storage, "hf", "config.json")) > 2
    assert len(read_file(storage, "hf", "model.safetensors")) > 2


def test_damage_is_named(bucket: str) -> None:
    checkpoint.save(f"{bucket}/ckpt", x=torch.ones(1000))
    storage, fs = open_storage(bucket), fsspec.filesystem("memory")
    file = "data-00000-0.safetensors"
    data = bytearray(read_file(storage, "ckpt", file))
    data[-5] ^= 1
    fs.pipe_file(f"/{bucket.removeprefix('memory://')}/ckpt/{file}", bytes(data))
    with pytest.raises(DamagedCheckpointError, match=file):
        checkpoint.load(f"{bucket}/ckpt", x=torch.zeros(1000))
    fs.pipe_file(f"/{bucket.removeprefix('memory://')}/ckpt/{file}", bytes(data[:-1]))
    with pytest.raises(DamagedCheckpointError, match="instead of"):
        checkpoint.load(f"{bucket}/ckpt", x=torch.zeros(1000))


def test_an_address_without_a_driver_is_refused() -> None:
    with pytest.raises(CheckpointError, match="fsspec cannot open"):
        open_storage("nosuchprotocol://bucket/run")
