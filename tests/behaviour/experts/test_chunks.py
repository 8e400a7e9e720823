"""Rows in chunks over four ranks: training as in one process, whatever else is asked of the layers, and the
same routing, capacity and balance as in one chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.mesh import MeshConfig
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import run_ranks
from tests.behaviour.test_layouts import losses
from tests.support.parallel_case import FEW, Layout, compare, one_process, train_parallel

pytestmark = pytest.mark.full
EP4 = MeshConfig(dp_shard=4, ep=4)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two micro-batches": {"micro_batches": 2},
    "layers recomputed": {"recompute": ("layer",)},
    "experts recomputed": {"recompute": ("experts", "router", "norms")},
    "rows sent again": {"recompute": ("dispatch", "norms")},
    "rows in host memory": {"offload": ("expert_input", "expert_pre_activation")},
    "packed rows by length": {"varlen": True},
    "dynamic groups, ranks without rows": {"dynamic": True, "max_tokens": 6},
    "whole gradients": {"shard": "optimizer"},
}


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_chunks_train_as_one_process(family: str, case: str, chunks: int) -> None:
    layout = Layout(EP4, chunks=chunks, **CASES[case])
    for of_rank in run_ranks(train_parallel, 4, family, layout, FEW, timeout=300.0):
        for optimizer, course in of_rank.items():
            wanted = one_process(family, optimizer, layout.dynamic, layout.num_layers)
            compare(course, wanted, f"{case}, {family}, {optimizer}")


POLICIES: dict[str, dict[str, Any]] = {
    "capacity by weight": {"experts__capacity__factor": 1.0},
    "padded capacity": {"experts__capacity__factor": 1.0, "experts__capacity__pad_to_max": True},
    "capacity of a device": {"experts__capacity__factor": 1.0, "experts__capacity__per": "device"},
    "expert choice": {"experts__selection": "expert_choice", "experts__balance__sequence": 0.0},
    "balance by bias": {"experts__balance__bias_rate": 0.01, "experts__balance__z_loss": 0.001},
    "rows in eight bits": {"experts__dispatch_dtype": "float8", "experts__dispatch_grad_dtype": "float8"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_in_chunks_has_the_losses_and_loads_of_one_chunk(tmp_path: Path, policy: str) -> None:
    # Few steps: rounding differs between CPUs, and grows from step to step until a choice of experts changes.
    shared: dict[str, Any] = {"mesh__ep": 4, "train__steps": 3, "optim__lr": 3e-3}
    runs = [losses(tmp_path / f"{n}", 4, **shared, **POLICIES[policy], experts__chunks=n) for n in (1, 2, 3)]
    loads = [
        [row["experts"] for row in read_metrics(tmp_path / f"{n}" / "metrics.jsonl") if "loss" in row]
        for n in (1, 2, 3)
    ]
    for run in runs[1:]:
        for found, wanted in zip(run, runs[0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    assert loads[1] == loads[2] == loads[0]
