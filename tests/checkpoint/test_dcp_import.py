"""Stock torch.distributed.checkpoint folders in, and out again: the same training goes on on either side."""

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DCPExportPolicy, DCPImportPolicy, LoadPolicy, from_dcp, to_dcp
from fsdmoe.checkpoint.dcp_folder import DCPFolder
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.dcp_stock import train_fsdmoe, train_fsdp2


@requires_transformers
@pytest.mark.full  # that every tensor and moment is imported bit for bit is tested in test_dcp_names.py
@pytest.mark.parametrize(
    ("architecture", "flat", "degrees"),
    [("deepseek_v3", True, {"tp": 2}), ("qwen3_moe", False, {"ep": 2}), ("mixtral", False, {})],
)
def test_training_goes_on_in_fsdmoe_and_back_in_fsdp2(
    tmp_path: Path, architecture: str, flat: bool, degrees: dict[str, int]
) -> None:
    stock, ours = str(tmp_path / "stock"), str(tmp_path / "ours")
    whole = run_ranks(train_fsdp2, 4, architecture, stock, 0, 6, 2, flat)[0]
    from_dcp(stock, ours)
    step, losses = run_ranks(train_fsdmoe, 2, architecture, degrees, ours, 4, ours + "-later")[0]
    assert step == 2
    assert losses == pytest.approx(whole[2:4], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    to_dcp(ours + "-later", stock + "-later", DCPExportPolicy(flat_optimizer=flat))
    again = run_ranks(train_fsdp2, 4, architecture, stock + "-later", 4, 6, 0, flat)[0]
    assert again == pytest.approx(whole[4:6], rel=1e-5)


class Held:
    """How many tensors that a method has returned are alive at once, at most."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self.alive, self.most = weakref.WeakSet[torch.Tensor](), 0
        real: Callable[..., torch.Tensor] = getattr(owner, method)

        def counted(*arguments: Any) -> torch.Tensor:
            found = real(*arguments)
            self.alive.add(found)
            self.most = max(self.most, len(self.alive))
            return found

        patch.setattr(owner, method, counted)


def test_a_conversion_holds_a_few_tensors_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, written = Held(monkeypatch, DCPFolder, "read_chunk"), Held(monkeypatch, RegionReader, "read_tensor")
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((64, 64), float(i)) for i in range(40)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "stock", no_dist=True)
    from_dcp(tmp_path / "stock", tmp_path / "ours")
    to_dcp(tmp_path / "ours", tmp_path / "again")
    assert 1 <= read.most <= 4  # one for each of the writer's threads
    assert 1 <= written.most <= 2


def stock_optimizer(folder: Path, **changes: Any) -> Path:
    """Two weights with AdamW's state, saved as FSDP2 does; ``changes`` to the state of the first."""
    shapes = {"model.layers.0.mlp.up_proj.weight": (3, 2), "model.norm.weight": (2,)}
    state = {
        name: {"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape), "step": torch.tensor(6.0)}
        for name, shape in shapes.items()
    }
    first = next(iter(state))
    state[first] = {kind: value for kind, value in (state[first] | changes).items() if value is not None}
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "params": list(shapes)}]
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    whole = {"app": {"model": weights, "optim": {"state": state, "param_groups": groups}}}
    dcp.save(whole, checkpoint_id=folder, no_dist=True)
    return folder


def test_the_step_is_the_optimizers_where_nobody_saved_one(tmp_path: Path) -> None:
    from_dcp(stock_optimizer(tmp_path / "stock"), tmp_path / "ours")
    policy = LoadPolicy(strict=False)  # the settings only
    values = checkpoint.load(tmp_path / "ours", step=0, optimizer={}, policy=policy)
    assert values["step"] == 6
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in values["optimizer"]["groups"]] == [
        ("decayed", 0.5, 0.1), ("not decayed", 0.5, 0.1),
    ]  # fmt: skip
    from_dcp(tmp_path / "stock", tmp_path / "given", DCPImportPolicy(step=11, only_model=True))
    assert checkpoint.load(tmp_path / "given", step=0) == {"step": 11}
    with pytest.raises(CheckpointError, match="optimizer: no such section"):
        checkpoint.load(tmp_path / "given", optimizer={})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_exp_avg_sq": torch.ones(3, 2)}, "only AdamW's"),
        ({"exp_avg": None}, "only AdamW's"),
        ({"exp_avg": torch.ones(2, 3)}, r"\(2, 3\), and its weight is \(3, 2\)"),
    ],
)
def test_state_that_is_not_adamws_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = stock_optimizer(tmp_path / "stock", **changes)
    with pytest.raises(CheckpointError, match=words):
        from_dcp(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


def test_experts_that_took_different_steps_have_the_largest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {f"model.layers.0.mlp.experts.{e}.down_proj.weight": torch.ones(2, 3) for e in range(3)}
    state = {
        name: {"exp_avg": value, "exp_avg_sq": value, "step": torch.tensor(float(4 + e))}
        for e, (name, value) in enumerate(weights.items())
    }
    whole = {"model": weights, "optim": {"state": state, "param_groups": []}}
    dcp.save(whole, checkpoint_id=tmp_path / "stock", no_dist=True)
    with caplog.at_level(logging.WARNING, "fsdmoe.checkpoint.dcp_import"):
        from_dcp(tmp_path / "stock", tmp_path / "ours")
    assert "took different numbers of steps" in caplog.text
    name = "model.layers.0.mlp.experts.down_proj"
    held = {"state": {name: {"exp_avg": torch.zeros(3, 2, 3), "exp_avg_sq": torch.zeros(3, 2, 3)}}}
    held["state"][name]["step"] = torch.zeros(())
    checkpoint.load(tmp_path / "ours", optimizer=held)
    assert held["state"][name]["step"] == 6
