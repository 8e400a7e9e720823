"""Muon, and what goes with it, with each other feature: the losses of one process, or a refusal of the
table."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe.config import features as on
from fsdmoe.config.compatibility import EXACT, TABLE, check_compatibility
from fsdmoe.core.features import RIGHT, Feature
from fsdmoe.fsdp.config import CPU_OFFLOAD
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.optim import Muon, MuonConfig
from fsdmoe.optim.config import MUON, SMALL_MOMENTS, STATE_OFFLOAD
from fsdmoe.testing import run_ranks
from tests.behaviour.test_compatibility import PLAIN, SETTINGS, _train, config_of, world_of
from tests.support import lora_case

pytest.importorskip("peft")

MUONS: dict[str, Any] = {"optim.name": "muon", "optim.muon.ns_dtype": "float32"}
OPTIMIZERS: dict[str, dict[str, Any]] = {"muon": MUONS, "adamw": {"optim.name": "adamw"}}
HERE = "tests/behaviour/optim/test_muon_pairs.py"


CLIPPED: dict[str, Any] = {
    "optim.qk_clip": 1e-3, "optim.qk_clip_rows": 5, "model.preset": "tiny-mixtral"
}  # fmt: skip


def losses(world: int, **changes: Any) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_train, world, folder, PLAIN | changes)
        rows = read_metrics(Path(folder) / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@functools.cache
def alone() -> list[tuple[float, float]]:
    return losses(1, **MUONS)


def check(feature: Feature) -> None:
    found = losses(max(2, world_of((feature,))), **MUONS | SETTINGS[feature])
    for mine, plain in zip(found, alone(), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5), feature.name


TRAINED = [feature for feature in (*EXACT, CPU_OFFLOAD) if feature is not STATE_OFFLOAD]


@pytest.mark.parametrize("feature", [on.TENSOR_PARALLELISM], ids=lambda each: each.name)
def test_a_feature_leaves_the_losses_of_muon_as_they_are(feature: Feature) -> None:
    check(feature)


@pytest.mark.full
@pytest.mark.parametrize("feature", TRAINED, ids=lambda each: each.name)
def test_every_feature_leaves_the_losses_of_muon_as_they_are(feature: Feature) -> None:
    check(feature)


@functools.cache
def clipped_alone(by: str = "muon") -> list[tuple[float, float]]:
    return losses(1, **CLIPPED | OPTIMIZERS[by])


def check_clipped(feature: Feature) -> None:
    by = "adamw" if feature is STATE_OFFLOAD else "muon"
    found = losses(max(2, world_of((feature,))), **CLIPPED | SETTINGS[feature] | OPTIMIZERS[by])
    for mine, alone in zip(found, clipped_alone(by), strict=True):
        assert mine == pytest.approx(alone, rel=1e-5), feature.name


WITH_CLIP = [
    each for each in (*EXACT, CPU_OFFLOAD) if each not in (on.CONTEXT_PARALLELISM, on.EXCHANGED_HEADS)
]


def test_the_losses_of_clipped_heads_are_those_of_one_process() -> None:
    assert clipped_alone()[1] != losses(1, **CLIPPED | MUONS | {"optim.qk_clip": 0})[1]
    check_clipped(on.TENSOR_PARALLELISM)


@pytest.mark.full
@pytest.mark.parametrize("feature", WITH_CLIP, ids=lambda each: each.name)
def test_every_feature_leaves_the_losses_of_clipped_heads_as_they_are(feature: Feature) -> None:
    check_clipped(feature)


def test_the_table_has_a_row_for_each_of_them() -> None:
    rows = {frozenset((row.feature, row.other)): row.verdict for row in TABLE}
    for feature in TRAINED:
        assert rows[frozenset((MUON, feature))] == RIGHT
    for feature, keys in {
        STATE_OFFLOAD: {"optim.state_offload": 0.5},
        SMALL_MOMENTS: {"optim.moment_dtype": "float8"},
    }.items():
        assert rows[frozenset((MUON, feature))] != RIGHT
        config = config_of((), **MUONS | keys)
        assert [row.other for row, _ in check_compatibility(config)] == [feature]


def test_weights_in_fp8_train_as_on_one_process() -> None:
    fp8 = {"precision.recipe": "fp8_blockwise", "precision.emulate": "true"}
    one, two = (losses(world, **fp8) for world in (1, 2))
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], rel=1e-3)


def adapters(mesh: dict[str, int]) -> lora_case.Steps:
    made = lambda kind, model: Muon(model, lr=1e-2, muon=MuonConfig(ns_dtype="float32"))  # noqa: E731
    before, lora_case.make_optimizer = lora_case.make_optimizer, made
    try:
        return lora_case.wrapped("qwen3_moe", "lora", "muon", 3, mesh)
    finally:
        lora_case.make_optimizer = before


def test_adapters_train_as_on_one_process() -> None:
    alone, apart = run_ranks(adapters, 1, {})[0], run_ranks(adapters, 2, {"ep": 2})[0]
    assert apart[0] == pytest.approx(alone[0], rel=1e-5)
    worst = max(float((apart[2][name] - whole).abs().max()) for name, whole in alone[2].items())
    assert worst < 1e-4
    assert torch.isfinite(torch.tensor(alone[0])).all()
