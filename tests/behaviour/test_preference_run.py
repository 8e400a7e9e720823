"""``train.py`` on pairs of answers: any mesh, resumed under another, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import requires_peft, run_ranks
from tests.behaviour.test_hf_run import STEPS, STOP, config_for, folder_of, go, losses

pytestmark = requires_peft


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Pairs that differ in length, for a tiny model with adapters."""
    records = [
        {
            "prompt": f"count {number}: ",
            "chosen": "one two"[: 3 + number % 5],
            "rejected": "x" * (1 + number % 3),
        }
        for number in range(40)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "data__kind": "preference", "data__path": str(folder / "pairs.jsonl"), "data__pack": False,
        "data__seq_len": 48, "data__cache_dir": str(folder / "cache"), "data__max_bytes": "none",
        "adapter__rank": 4, "optim__lr": 0.02, "preference__beta": 0.5, **changes,
    }  # fmt: skip


def rewards(folder: Path) -> list[tuple[float, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["reward_margin"], row["reward_accuracy"]) for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, {"mesh__ep": 2}), (2, {})),
        pytest.param(
            (4, {"mesh__ep": 2, "memory__recompute": "layer"}), (1, {"train__micro_batch_size": 4}),
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_pairs_train_alike_on_any_mesh_and_go_on_under_another(
    tmp_path: Path, first: tuple[int, dict[str, Any]], then: tuple[int, dict[str, Any]]
) -> None:
    hf = folder_of(tmp_path, output_router_logits=False)
    given = settings(tmp_path)
    run_ranks(go, 1, str(hf), str(tmp_path / "one"), STEPS, given)
    expected = losses(tmp_path / "one")
    assert expected[0][0] == pytest.approx(0.6931472, rel=1e-6)  # the adapters change nothing yet
    assert expected[-1][0] < expected[0][0] - 0.05
    expected_rewards = rewards(tmp_path / "one")
    assert expected_rewards[0] == (0, 0)
    assert expected_rewards[-1][0] > 0.1
    assert expected_rewards[-1][1] > 0.5
    run_ranks(go, first[0], str(hf), str(tmp_path / "split"), STOP, given | first[1])
    run_ranks(go, then[0], str(hf), str(tmp_path / "split"), STEPS, given | then[1])
    for step, (mine, theirs) in enumerate(zip(losses(tmp_path / "split"), expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-5), f"step {step}"
    for step, got in enumerate(rewards(tmp_path / "split")):
        assert got == pytest.approx(expected_rewards[step], rel=1e-4, abs=1e-5), f"step {step}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data__pack": True}, r"data\.pack: expected false, since each pair has a row of its own"),
        ({"adapter__rank": 0}, r"data\.kind: the reference .* is the model without .*, got adapter\.rank"),
        ({"adapter__freeze_base": False}, r"data\.kind: .* got adapter\.freeze_base = false"),
        ({"train__graphs": "step"}, r"data\.kind: the forward of the reference is not captured"),
    ],
)  # fmt: skip
def test_what_pairs_cannot_have_is_refused(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_for(str(folder_of(tmp_path)), 1, **settings(tmp_path, **changes))


def test_a_pair_that_is_longer_than_a_row_is_refused(tmp_path: Path) -> None:
    from fsdmoe.data import build_data

    config = config_for(str(folder_of(tmp_path)), 1, **settings(tmp_path, data__seq_len=16)).data
    with pytest.raises(ConfigError, match=r"^data\.seq_len: expected rows for the longest pair of .* got 16"):
        build_data(config, dp_rank=0, dp_size=1, micro_batch_size=1, global_batch_size=1, seed=0)
