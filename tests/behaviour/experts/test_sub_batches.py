"""Rows in sub-batches over four ranks: training as in one process, whatever else is asked of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.mesh import MeshConfig
from fsdmoe.testing import run_ranks
from tests.behaviour.test_layouts import losses
from tests.support.parallel_case import FEW, Layout, compare, one_process, train_parallel

EP4 = MeshConfig(dp_shard=4, ep=4)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts recomputed": {"recompute": ("experts", "router", "norms")},
    "whole gradients": {"shard": "optimizer"},
    "packed rows by length": {"varlen": True},
    "context parallel": {"mesh": MeshConfig(dp_shard=2, cp=2, ep=4)},
    "tensor parallel": {"mesh": MeshConfig(dp_shard=2, tp=2, ep=4)},
    "expert tensor parallel": {"mesh": MeshConfig(dp_shard=4, ep=2, etp=2)},
}


FAMILIES = ("deepseek_v3", "qwen3_moe", "gpt_oss")
QUICK = ("plain", "deepseek_v3")
MATRIX = [
    (*QUICK, 2, ("sgd",)),  # which sees the scale of gradients
    *(
        pytest.param(case, family, FEW, ("sgd", "adamw"), marks=pytest.mark.full)
        for case in CASES
        for family in FAMILIES
    ),
]


@pytest.mark.parametrize(("case", "family", "steps", "optimizers"), MATRIX)
def test_sub_batches_train_as_one_process(
    case: str, family: str, steps: int, optimizers: tuple[str, ...]
) -> None:
    layout = Layout(**({"mesh": EP4, "sub_batches": 2} | CASES[case]))
    for of_rank in run_ranks(train_parallel, 4, family, layout, steps, optimizers, timeout=300.0):
        for optimizer, course in of_rank.items():
            wanted = one_process(family, optimizer, layout.dynamic, layout.num_layers)
            compare(course, wanted, f"{case}, {family}, {optimizer}")


FP8 = {"precision__recipe": "fp8_blockwise", "precision__emulate": True, "precision__quantized_weights": True}
POLICIES: dict[str, tuple[dict[str, Any], float]] = {
    "balance by bias": ({"experts__balance__bias_rate": 0.01, "experts__balance__z_loss": 0.001}, 1e-5),
    "balance of a micro-batch": ({"experts__balance__micro_batch": 0.01}, 1e-5),
    "capacity by weight": ({"experts__capacity__factor": 1.0}, 1e-5),
    "expert choice": ({"experts__selection": "expert_choice", "experts__balance__sequence": 0.0}, 1e-5),
    "fp8 in blocks": (FP8, 1e-3),
}


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_in_sub_batches_has_the_losses_of_smaller_micro_batches(tmp_path: Path, policy: str) -> None:
    keys, tolerance = POLICIES[policy]
    shared = {"mesh__ep": 2, "train__steps": 3, "train__global_batch_size": 8} | keys
    apart = losses(tmp_path / "1", 2, **shared, train__micro_batch_size=1)
    beside = losses(tmp_path / "2", 2, **shared, train__micro_batch_size=2, experts__sub_batches=2)
    for found, wanted in zip(beside, apart, strict=True):
        assert found == pytest.approx(wanted, rel=tolerance)
