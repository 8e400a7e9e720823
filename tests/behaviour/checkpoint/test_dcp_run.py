"""``train.py`` from a converted stock checkpoint: weights, optimizer and step go on, the data begins anew."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdmoe.checkpoint import from_dcp, to_dcp
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.behaviour.test_resume import State, state_of
from tests.support.tiny_run import tiny_config

STEPS = 3


def go(folder: str, load: str, **overrides: Any) -> tuple[State, dict[str, int], int]:
    """The state at the start, how far the run is, and the steps of data that it has read."""
    settings = {"checkpoint__load": load, "checkpoint__asynchronous": False, "train__eval_interval": -1}
    config = tiny_config(folder, dist.get_world_size(), **settings, **overrides)
    run = Run(config, build_meshes(config.mesh))
    if load == "none":
        for _ in range(STEPS):
            run.train_step()
        run.checkpoints.save(STEPS, run.state())
    state, position = state_of(run), run.data.state_dict()["steps"]
    run.train_step()
    run.checkpoints.close()
    run.close("done")
    return state, run.progress, position


def begin(folder: str) -> tuple[State, dict[str, int], int]:
    return go(folder, "none", mesh__ep=2)


def go_on(folder: str, load: str) -> tuple[State, dict[str, int], int]:
    return go(folder, load, mesh__tp=2)


@pytest.mark.full
def test_a_run_goes_on_from_a_stock_folder(tmp_path: Path) -> None:
    before, _, read = run_ranks(begin, 2, str(tmp_path / "one"))[0]
    assert read == STEPS
    to_dcp(tmp_path / "one/checkpoints", tmp_path / "stock")
    from_dcp(tmp_path / "stock", tmp_path / "converted")
    after, progress, read = run_ranks(go_on, 2, str(tmp_path / "two"), str(tmp_path / "converted"))[0]
    assert progress["step"] == STEPS + 1
    assert read == 0
    tensors = {name for name in before if not name.startswith("value ")}
    assert any("exp_avg_sq" in name for name in tensors)
    assert {name: after[name] for name in tensors} == {name: before[name] for name in tensors}
    assert after["value optimizer"] == before["value optimizer"]
