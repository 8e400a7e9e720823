"""Rows in sub-batches over four ranks: training as in one process, whatever else is asked of the layers."""

from __future__ import annotations

from typing import Any

import pytest

from fsdmoe.mesh import MeshConfig
from fsdmoe.testing import run_ranks
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
    pytest.param(case, family, marks=[] if (case, family) == QUICK else pytest.mark.full)
    for case in CASES
    for family in FAMILIES
]


@pytest.mark.parametrize(("case", "family"), MATRIX)
def test_sub_batches_train_as_one_process(case: str, family: str) -> None:
    layout = Layout(**({"mesh": EP4, "sub_batches": 2} | CASES[case]))
    for of_rank in run_ranks(train_parallel, 4, family, layout, FEW, timeout=300.0):
        for optimizer, course in of_rank.items():
            wanted = one_process(family, optimizer, layout.dynamic, layout.num_layers)
            compare(course, wanted, f"{case}, {family}, {optimizer}")
