"""The self-check on real ranks: clean under any mesh, and each fault named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdmoe.check import layer, measure, self_check
from fsdmoe.check.judge import Verdict
from fsdmoe.check.layer import seen_files
from fsdmoe.check.measure import time_of_day
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.tiny_run import tiny_config

Rows = list[tuple[str, str, str]]


def _once(act: Callable[[], object], device: torch.device) -> float:
    act()
    return 1.0


@pytest.mark.parametrize(
    ("takes", "settles_at"),
    [([0.9, 0.1], 0.9), ([0.3, 0.9, 0.1], 0.9), ([0.3, 0.2, 0.9], 0.9), ([0.3, 0.2, 0.1], 0.3)],
)
def test_rates_are_taken_again_while_one_is_slow_and_the_best_counts(
    takes: list[float], settles_at: float
) -> None:
    left = iter(takes)
    assert self_check.settled(lambda: {"a": 1.0, "b": 1.0, "c": next(left)})["c"] == settles_at


def _check(folder: str, degrees: dict[str, Any]) -> Rows:
    config = tiny_config(folder, dist.get_world_size(), **degrees)
    # Rates of a machine that is shared by many depend on it; what they mean is judged from recorded ones.
    with (
        mock.patch.object(measure, "_best_seconds", _once),
        mock.patch.object(measure, "host", return_value=f"node{dist.get_rank() // 2}"),
    ):
        found = self_check.self_check(config, build_meshes(config.mesh))
    return [(each.check, str(each.verdict), each.text) for each in found]


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"mesh__ep": 2, "mesh__tp": 2}, marks=pytest.mark.full, id="ep2-tp2"),
        pytest.param({"mesh__ep": 4}, marks=pytest.mark.full, id="ep4"),
        pytest.param({"mesh__ep": 2, "mesh__dp_outer": 2}, marks=pytest.mark.full, id="ep2-outer2"),
        pytest.param({"mesh__cp": 2, "mesh__ep": 2}, marks=pytest.mark.full, id="cp2-ep2"),
        pytest.param({"mesh__ep": 2, "mesh__etp": 2}, marks=pytest.mark.full, id="ep2-etp2"),
        pytest.param({"mesh__ep": 2, "experts__dispatcher": "flex"}, marks=pytest.mark.full, id="flex"),
    ],
)
def test_well_machines_pass_every_check_and_leave_nothing(tmp_path: Path, degrees: dict[str, Any]) -> None:
    rows = run_ranks(_check, 4, str(tmp_path), degrees)
    assert [row for row in rows[0] if row[1] != Verdict.OK] == []
    checks = "versions,clocks,folder,disk,GEMM,copy,links,group ep,experts,gradients,checkpoint"
    assert set(checks.split(",")) <= {check for check, _, _ in rows[0]}
    assert rows[0] == rows[3]
    assert list(tmp_path.iterdir()) == []


def _sick(folder: str) -> Rows:
    """Rank 1 has another clock, another folder under the same name, and experts that are not its own."""
    owners, rank = layer.judge_owners, dist.get_rank()

    def twice(owned: list[dict[int, int]], each: int, *rest: Any) -> Any:
        return owners([own | {0: each} for own in owned], each, *rest)

    def late() -> float:
        return time_of_day() + 30 * rank

    def elsewhere(_: Path) -> list[int]:
        return seen_files(Path(f"{folder}/of_rank_{rank}"))

    with (
        mock.patch.object(layer, "judge_owners", twice),
        mock.patch.object(measure, "time_of_day", late),
        mock.patch.object(self_check, "seen_files", elsewhere),
    ):
        return _check(folder, {"mesh__ep": 2})


def test_each_fault_is_named_with_host_and_rank(tmp_path: Path) -> None:
    found = {
        check: text for check, verdict, text in run_ranks(_sick, 2, str(tmp_path))[0] if verdict == "FAILED"
    }
    assert found.keys() == {"clocks", "folder", "experts"}
    assert "rank 1 (node0) is" in found["clocks"]
    assert "does not see the files of others" in found["folder"]
    assert "expert 0 is owned more than once: rank 0 (node0), rank 1 (node0)" in found["experts"]


def _start_of_a_sick_run(folder: str) -> tuple[str, bool]:
    config = tiny_config(folder, 1)
    meshes = build_meshes(config.mesh)
    failed = [self_check.CheckResult("clocks", Verdict.FAILED, "rank 0 (here) is +9 s off")]
    with (
        mock.patch.object(self_check, "self_check", return_value=failed),
        pytest.raises(ConfigError) as error,
    ):
        self_check.run_self_check(config, meshes, only=False)
    return str(error.value), self_check.wants_self_check(config, meshes)


def test_a_run_on_sick_machines_is_refused_and_one_node_is_not_checked(tmp_path: Path) -> None:
    text, is_wanted = run_ranks(_start_of_a_sick_run, 1, str(tmp_path))[0]
    assert "train.self_check" in text
    assert "clocks: rank 0 (here) is +9 s off" in text
    assert not is_wanted
