"""Stock folders out: their keys, groups and chunks; stock torch.distributed.checkpoint reads them."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DCPExportPolicy, dcp_export, from_dcp, to_dcp
from fsdmoe.checkpoint.dcp_names import parse_rule
from fsdmoe.testing import run_ranks


def everything(folder: Path) -> dict[str, Any]:
    """All that stock DCP finds in a folder, nested as it was told."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def ours(folder: Path, groups: list[dict[str, Any]] | None = None) -> dict[str, torch.Tensor]:
    """A checkpoint with a matrix and a vector, and AdamW's state; returns the weights."""
    weights = {"block.weight": torch.randn(6, 4), "block.bias": torch.randn(6)}
    state = {
        name: {"exp_avg": value + 1, "exp_avg_sq": value + 2, "step": torch.tensor(5.0)}
        for name, value in weights.items()
    }
    named = [
        {"name": "decayed", "lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-5, "weight_decay": 0.3},
        {"name": "not decayed", "lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-5, "weight_decay": 0.0},
    ]
    optimizer = {"state": state, "groups": named if groups is None else groups}
    checkpoint.save(folder, weights, optimizer, progress={"step": 5})  # type: ignore[arg-type]
    return weights


def test_a_folder_has_weights_state_groups_and_step(tmp_path: Path) -> None:
    weights = ours(tmp_path / "ours")
    to_dcp(tmp_path / "ours", tmp_path / "stock")
    found = everything(tmp_path / "stock")
    assert set(found) == {"model", "optim", "step"}
    assert found["step"] == 5
    for name, value in weights.items():
        assert torch.equal(found["model"][name], value)
        assert torch.equal(found["optim"]["state"][name]["exp_avg_sq"], value + 2)
        assert found["optim"]["state"][name]["step"] == 5
    decayed, others = found["optim"]["param_groups"]
    assert decayed["params"] == ["block.weight"]
    assert others["params"] == ["block.bias"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == (0.8, 0.9)
    assert set(decayed) == set(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])


def test_keys_names_and_groups_are_chosen(tmp_path: Path) -> None:
    ours(tmp_path / "ours")
    rules = [parse_rule(r"block\.(.*)=net.\1")]
    policy = DCPExportPolicy(model_key="", optimizer_key="app.opt", rules=rules, flat_optimizer=True)
    to_dcp(tmp_path / "ours", tmp_path / "bare", policy)
    keys = set(dcp.FileSystemReader(tmp_path / "bare").read_metadata().state_dict_metadata)
    assert {"net.weight", "app.opt.state.net.bias.step", "app.opt.param_groups.net.bias.lr"} <= keys
    to_dcp(tmp_path / "ours", tmp_path / "one", DCPExportPolicy(one_group=True))
    (group,) = everything(tmp_path / "one")["optim"]["param_groups"]
    assert sorted(group["params"]) == ["block.bias", "block.weight"]
    assert group["weight_decay"] == 0.3
    to_dcp(tmp_path / "ours", tmp_path / "weights", DCPExportPolicy(only_model=True))
    assert set(everything(tmp_path / "weights")) == {"model", "step"}


def test_groups_have_the_members_that_the_optimizer_gave_them(tmp_path: Path) -> None:
    groups = [
        {"name": "decayed", "lr": 0.1, "weight_decay": 0.3, "members": ["block.bias"]},
        {"name": "not decayed", "lr": 0.1, "weight_decay": 0.0, "members": ["frozen.weight"]},
        {"name": "slow", "lr": 0.01, "weight_decay": 0.0, "members": ["block.weight"]},
    ]
    ours(tmp_path / "ours", groups)
    to_dcp(tmp_path / "ours", tmp_path / "stock")
    found = everything(tmp_path / "stock")["optim"]["param_groups"]
    told = [(group["params"], group["lr"], group["weight_decay"]) for group in found]
    assert told == [(["block.bias"], 0.1, 0.3), (["block.weight"], 0.01, 0.0)]
    assert not {"name", "members"} & found[0].keys()


def test_groups_of_which_the_members_are_not_known_are_refused(tmp_path: Path) -> None:
    ours(tmp_path / "ours", [{"lr": 0.1}, {"lr": 0.2}])
    with pytest.raises(CheckpointError, match="--one-group"):
        to_dcp(tmp_path / "ours", tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    ours(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="two tensors would have this name"):
        to_dcp(tmp_path / "ours", tmp_path / "stock", DCPExportPolicy(rules=[parse_rule(".*=x")]))


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    ours(tmp_path / "ours")
    to_dcp(tmp_path / "ours", tmp_path / "stock")
    before = (tmp_path / "stock/.metadata").read_bytes()
    with pytest.raises(CheckpointError, match="with other files, which are not replaced"):
        to_dcp(tmp_path / "ours", tmp_path / "stock")
    assert (tmp_path / "stock/.metadata").read_bytes() == before


def test_tied_names_are_both_there(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    checkpoint.save(tmp_path / "ours", model)
    to_dcp(tmp_path / "ours", tmp_path / "stock")
    found = everything(tmp_path / "stock")["model"]
    assert torch.equal(found["0.weight"], found["1.weight"])


def test_object_stores_hold_stock_folders_too(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    weights, address = ours(tmp_path / "ours"), f"memory://{tmp_path.name}"
    to_dcp(tmp_path / "ours", f"{address}/stock")
    rules = [parse_rule(r"(.*)=\1")]
    from_dcp(f"{address}/stock", tmp_path / "again", checkpoint.DCPImportPolicy(rules=rules))
    blank = {name: torch.zeros_like(value) for name, value in weights.items()}
    checkpoint.load(tmp_path / "again", blank)  # type: ignore[arg-type]
    assert all(torch.equal(blank[name], value) for name, value in weights.items())


def there_and_back(folder: str) -> int:
    # a few rows: every tensor in several chunks, ranks taking turns
    with mock.patch.object(dcp_export, "_CHUNK_BYTES", 40):
        to_dcp(f"{folder}/ours", f"{folder}/stock")
    from_dcp(f"{folder}/stock", f"{folder}/again", checkpoint.DCPImportPolicy(rules=[parse_rule(r"(.*)=\1")]))
    return len(
        dcp.FileSystemReader(f"{folder}/stock")
        .read_metadata()
        .state_dict_metadata["model.block.weight"]
        .chunks
    )


def test_ranks_write_and_read_together_and_lose_nothing(tmp_path: Path) -> None:
    weights = ours(tmp_path / "ours")
    assert run_ranks(there_and_back, 2, str(tmp_path)) == [3, 3]
    blank = {name: torch.zeros_like(value) for name, value in weights.items()}
    moments = {
        name: {"exp_avg": torch.zeros_like(v), "exp_avg_sq": torch.zeros_like(v), "step": torch.zeros(())}
        for name, v in weights.items()
    }
    optimizer = {"state": moments}
    values = checkpoint.load(tmp_path / "again", blank, optimizer, progress={})  # type: ignore[arg-type]
    assert values["progress"]["step"] == 5
    for name, value in weights.items():
        assert torch.equal(blank[name], value)
        assert torch.equal(moments[name]["exp_avg"], value + 1)
        assert moments[name]["step"] == 5
