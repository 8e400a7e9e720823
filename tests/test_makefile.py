"""What the Makefile must and must not do."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_clean_leaves_the_runs_of_its_user_alone() -> None:
    plan = subprocess.run(
        ["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    removed = [word for line in plan.splitlines() if line.startswith("rm") for word in line.split()[2:]]
    assert ".venv" in removed
    assert not any(word.strip("./").startswith("runs") or word in (".", "*") for word in removed)


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_the_quick_start_takes_one_rank_where_there_is_one_gpu(
    tmp_path: Path, num_gpus: int, ranks: int
) -> None:
    lists = "".join(f"echo 'GPU {index}: NVIDIA H200 (UUID: GPU-{index})'\n" for index in range(num_gpus))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lists}exit {0 if num_gpus else 9}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if name != "RANKS"} | {"PATH": path}
    plan = subprocess.run(
        ["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert f"--nproc-per-node {ranks} " in plan
