"""Averaged weights in a run: evaluated, saved and exported; with each other feature those of one process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.checkpoint.hf_export import ExportPolicy, to_hf
from fsdmoe.checkpoint.session import open_newest
from fsdmoe.config import features as on
from fsdmoe.config.compatibility import EXACT, TABLE, check_compatibility
from fsdmoe.core.features import RIGHT, Feature
from fsdmoe.fsdp.config import CPU_OFFLOAD
from fsdmoe.mesh import build_meshes
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.optim.config import EMA, MUON, QK_CLIP, SMALL_MOMENTS
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.behaviour.test_compatibility import PLAIN, SETTINGS, _train, config_of, world_of
from tests.support.tiny_run import tiny_config

AVERAGED: dict[str, Any] = PLAIN | {"optim.ema.decay": 0.5, "train.eval_interval": 2}
KEYS: dict[Feature, dict[str, Any]] = SETTINGS | {
    MUON: {"optim.name": "muon", "optim.muon.ns_dtype": "float32"},
    QK_CLIP: {"optim.qk_clip": 1.0},
    SMALL_MOMENTS: {"optim.moment_dtype": "float8"},
}
CHANGING = (MUON, QK_CLIP, SMALL_MOMENTS)
"""These change numbers: one process has them too."""


def evaluated(world: int, **changes: Any) -> tuple[float, float]:
    """The held-out loss of the weights, and of their average."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_train, world, folder, AVERAGED | changes)
        row = next(row for row in read_metrics(Path(folder) / "metrics.jsonl") if "eval_loss" in row)
    return row["eval_loss"], row["eval_loss_ema"]


@functools.cache
def alone(feature: Feature | None = None) -> tuple[float, float]:
    return evaluated(1, **KEYS[feature] if feature is not None else {})


def check(feature: Feature) -> None:
    plain = alone(feature if feature in CHANGING else None)
    assert abs(plain[0] - plain[1]) > 1e-4
    world = 2 if feature in CHANGING else max(2, world_of((feature,)))
    assert evaluated(world, **KEYS[feature]) == pytest.approx(plain, rel=1e-5), feature.name


TRAINED = [*EXACT, CPU_OFFLOAD, *CHANGING]


@pytest.mark.parametrize("feature", [on.TENSOR_PARALLELISM], ids=lambda each: each.name)
def test_a_feature_leaves_the_loss_of_averaged_weights_as_it_is(feature: Feature) -> None:
    check(feature)


@pytest.mark.full
@pytest.mark.parametrize("feature", TRAINED, ids=lambda each: each.name)
def test_every_feature_leaves_the_loss_of_averaged_weights_as_it_is(feature: Feature) -> None:
    check(feature)


def test_the_table_has_a_row_for_each_of_them() -> None:
    rows = {frozenset((row.feature, row.other)): row.verdict for row in TABLE}
    for feature in TRAINED:
        assert rows[frozenset((EMA, feature))] == RIGHT
    config = config_of((), **{"optim.ema.decay": 0.5, "train.graphs": "layer"})
    assert {row.feature for row, _ in check_compatibility(config)} >= {EMA}


def train_and_export(folder: str) -> None:
    config = tiny_config(f"{folder}/run", dist.get_world_size(), train__steps=2, optim__ema__decay=0.5)
    run = Run(config, build_meshes(config.mesh))
    for _ in range(2):
        run.train_step()
    run.checkpoints.save(2, run.state(), in_background=False)
    run.close("finished")
    for ema in (False, True):
        to_hf(f"{folder}/run/checkpoints", f"{folder}/hf-{ema}", ExportPolicy(dtype=torch.float32, ema=ema))


def test_the_average_is_exported_on_request(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_ranks(train_and_export, 2, str(tmp_path))
    plain, averaged = (load_file(tmp_path / f"hf-{ema}/model.safetensors") for ema in (False, True))
    reader = open_newest(tmp_path / "run/checkpoints")
    name = "lm_head.weight"
    assert torch.equal(plain[name], reader.read_tensor(f"model/{name}"))
    assert torch.equal(averaged[name], reader.read_tensor(f"ema/tensors/{name}"))
    assert plain.keys() == averaged.keys()
    assert sum(not torch.equal(plain[key], averaged[key]) for key in plain) == len(plain)
