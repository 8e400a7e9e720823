"""Tokens in the rows of a run whose rows are partly padding, on two ranks and then resumed on one."""

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.mesh import build_meshes
from fsdmoe.observe.metrics import Row, read_metrics
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config


def train(folder: str, world_size: int, steps: int) -> None:
    overrides: dict[str, Any] = {
        "data__kind": "text", "data__max_bytes": "none", "data__path": f"{folder}/text.txt",
        "data__separator": "|", "data__pack": False, "data__cache_dir": f"{folder}/cache",
        "data__holdout": 0.0, "train__eval_interval": -1, "train__steps": steps,
        "checkpoint__interval": 100, "checkpoint__load": "latest",
    }  # fmt: skip
    config = tiny_config(f"{folder}/run", world_size, **overrides)
    run = Run(config, build_meshes(config.mesh))
    run.loop([])
    run.checkpoints.close()
    run.close("finished")


def rate(row: Row, before: int) -> float:
    return (row["tokens"] - before) / row["seconds"]


def test_padding_is_no_token_also_after_a_resume_on_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("|".join("x" * (2 + number % 11) for number in range(400)))
    run_ranks(train, 2, str(tmp_path), 2, 2)
    run_ranks(train, 1, str(tmp_path), 1, 4)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    read = [sum(source["tokens"] for source in row["sources"].values()) for row in rows]
    assert [row["tokens"] for row in rows] == read
    assert read[-1] < 0.4 * 4 * 8 * 32
    rates = [rate(row, before) for row, before in zip(rows, [0, *read], strict=False)]
    assert [row["tokens_per_s"] for row in rows] == pytest.approx(rates)
    summary = (tmp_path / "run/summary.txt").read_text()
    assert f"{read[-1]} (" in summary
