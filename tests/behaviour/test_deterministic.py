"""``train.deterministic``: a rerun and a resumed run have the same bits, and what cannot is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdmoe.checkpoint.compare import differences
from fsdmoe.checkpoint.session import open_newest
from fsdmoe.config.compatibility import check_compatibility
from fsdmoe.kernels.backend import use_fixed_order
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.behaviour.test_compatibility import config_of
from tests.support.tiny_run import tiny_config

KEYS = {
    "train__deterministic": "true", "train__steps": 4, "train__eval_interval": -1, "mesh__ep": 2,
    "checkpoint__interval": 2, "checkpoint__keep_last": 9,
}  # fmt: skip


def _train(folder: str, load: str) -> bool:
    use_fixed_order()
    config = tiny_config(folder, dist.get_world_size(), **KEYS, checkpoint__load=load)
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))
    run.checkpoints.close()
    return torch.are_deterministic_algorithms_enabled()


def assert_same_bits(one: Path, other: Path) -> None:
    found, num_equal = differences(open_newest(one / "checkpoints"), open_newest(other / "checkpoints"))
    assert not found
    assert num_equal > 10, "weights and moments"


def test_a_rerun_and_a_resumed_run_have_the_same_bits(tmp_path: Path) -> None:
    whole, again, resumed = (tmp_path / name for name in ("whole", "again", "resumed"))
    assert run_ranks(_train, 2, str(whole), "none") == [True, True]
    run_ranks(_train, 2, str(again), "none")
    run_ranks(_train, 2, str(resumed), str(whole / "checkpoints/step_00000002"))
    assert_same_bits(whole, again)
    assert_same_bits(whole, resumed)


TORCHAO = {"precision.recipe": "mxfp8", "precision.param_dtype": "bfloat16", "precision.backend": "torchao"}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({}, []),
        ({"train.graphs": "layer", "data.pack": "false"}, []),
        ({"train.graphs": "layer"}, ["train.graphs"]),
        (TORCHAO, ["precision.backend"]),
    ],
)
def test_what_may_have_other_bits_after_a_resume_is_refused(keys: dict[str, str], refused: list[str]) -> None:
    config = config_of((), **{"train.deterministic": "true"}, **keys)
    assert [row.other.key for row, _ in check_compatibility(config)] == refused
