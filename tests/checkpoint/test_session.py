"""Any layout to any other, bit for bit, through our own files."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from fsdmoe.checkpoint.api import LoadPolicy, load
from fsdmoe.checkpoint.blocks import BLOCK_BYTES
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.planner import PlanCache
from fsdmoe.checkpoint.session import Verify, describe, write_state
from fsdmoe.checkpoint.tree import split_tree
from fsdmoe.checkpoint.writer import SaveOrder
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.checkpoint_states import LAYOUTS, assert_same, whole_state


def write(folder: str, name: str, state: dict[str, Any], cache: PlanCache | None = None) -> None:
    tensors, values = split_tree(state)
    write_state(SaveOrder(LocalStorage(folder), name, values, describe()), tensors, cache)


def save_layouts(layouts: dict[str, dict[str, int]], folder: str) -> None:
    for name, degrees in layouts.items():
        write(folder, name, whole_state(build_meshes(**degrees)))


def load_layouts(layouts: dict[str, dict[str, int]], folder: str, names: list[str], verify: Verify) -> None:
    for degrees in layouts.values():
        meshes = build_meshes(**degrees)
        for name in names:
            state = whole_state(meshes, filled=False)
            assert_same(load(f"{folder}/{name}", policy=LoadPolicy(verify=verify), **state))


def by_world(names: list[str]) -> dict[int, dict[str, dict[str, int]]]:
    """Layouts of one world run in one case."""
    found: dict[int, dict[str, dict[str, int]]] = {}
    for name in names:
        world, degrees = LAYOUTS[name]
        found.setdefault(world, {})[name] = degrees
    return found


def save_all(names: list[str], folder: str) -> None:
    for world, layouts in by_world(names).items():
        run_ranks(save_layouts, world, layouts, folder)


def test_checkpoints_load_bit_for_bit_under_other_layouts(tmp_path: Path) -> None:
    """A covering sample: every kind of split is written by worlds of 1, 3, 4 and 8 ranks, and read by those
    of 1, 3 and 4."""
    sample = ["one", "fsdp3", "hsdp 2x2 ep2", "tp2 etp2", "cp2 tp2 ep2 etp2"]
    save_all(sample, str(tmp_path))
    for world, layouts in by_world(["one", "fsdp3", "fsdp4 ep4", "tp2 etp2"]).items():
        run_ranks(load_layouts, world, layouts, str(tmp_path), sample, "fast")


@pytest.mark.full
def test_every_layout_loads_every_layout(tmp_path: Path) -> None:
    save_all(list(LAYOUTS), str(tmp_path))
    for world, layouts in by_world(list(LAYOUTS)).items():
        run_ranks(load_layouts, world, layouts, str(tmp_path), list(LAYOUTS), "full", timeout=600)


def save_thrice(folder: str) -> int:
    meshes, cache = build_meshes(dp_outer=2, ep=2), PlanCache()
    state = whole_state(meshes)
    for count in range(3):
        state["step"] = 10 + count
        write(folder, f"s{count}", state, cache)
    state["model"]["norm.weight"] = state["model"]["norm.weight"].float()  # the plan must notice
    write(folder, "s3", state, cache)
    return cache.hits


def test_the_plan_is_reused_until_the_state_changes(tmp_path: Path) -> None:
    hits = run_ranks(save_thrice, 4, str(tmp_path))
    assert hits == [2, 0, 0, 0]  # the coordinator counts
    dtypes = [
        json.loads((tmp_path / f"s{n}/metadata.json").read_text())["tensors"]["model/norm.weight"]["dtype"]
        for n in (2, 3)
    ]
    assert dtypes == ["BF16", "F32"]


def test_replicas_write_every_byte_once_and_share_the_work(tmp_path: Path) -> None:
    run_ranks(save_layouts, 8, {"ckpt": LAYOUTS["hsdp2 ep4"][1]}, str(tmp_path))
    metadata = json.loads((tmp_path / "ckpt/metadata.json").read_text())
    assert len(metadata["files"]) == 8  # one small file a rank: all of them had something to write
    for name, tensor in metadata["tensors"].items():
        volume = sum(torch.Size(sizes).numel() for _, sizes, _, _ in tensor["boxes"])
        assert volume == torch.Size(tensor["shape"]).numel(), name


def test_files_are_safetensors_and_the_manifest_has_their_true_checksums(tmp_path: Path) -> None:
    run_ranks(save_layouts, 2, {"ckpt": {}}, str(tmp_path))
    manifest = json.loads((tmp_path / "ckpt/manifest.json").read_text())
    on_disk = {path.name for path in (tmp_path / "ckpt").iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    for name, record in manifest["files"].items():
        data = (tmp_path / "ckpt" / name).read_bytes()
        assert record["bytes"] == len(data)
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        assert record["crc32"] == "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    with safe_open(str(tmp_path / "ckpt/data-00000-0.safetensors"), "pt") as file:
        keys = list(file.keys())
        assert any(key.startswith("model/embed_tokens.weight@") for key in keys)
        assert all(file.get_tensor(key).numel() >= 0 for key in keys)


def save_disagreeing(folder: str, kind: str) -> str:
    state, rank = whole_state(build_meshes()), dist.get_rank()
    if kind == "values":
        state["data"] = {"position": rank}
    elif kind == "shapes":
        state["model"]["router_bias"] = torch.zeros(8 + rank)
    elif kind == "pieces" and rank == 1:
        del state["model"]["q_proj.weight"]
    with pytest.raises(CheckpointError) as caught:
        write(folder, "bad", state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"), [("values", "'data' differ"), ("shapes", "router_bias"), ("pieces", "q_proj.weight")]
)
def test_what_ranks_do_not_agree_on_is_not_saved(tmp_path: Path, kind: str, words: str) -> None:
    for message in run_ranks(save_disagreeing, 2, str(tmp_path), kind):
        assert words in message
    assert list(tmp_path.iterdir()) == []
