"""TRL's trainers of preferences and rewards on two ranks are those of one process, and go on when killed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import fsdmoe
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import RankFailure, requires_transformers, run_ranks
from tests.support.trl_case import Found, build_trainer, run_trl, write_completions

pytestmark = [
    requires_transformers,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="pip install trl"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft"),
    pytest.mark.full,  # seconds of imports on every rank; tests/huggingface/test_reference.py is quick
]


def compare(got: Found, wanted: Found) -> None:
    assert len(wanted["loss"]) == 3
    assert got.keys() == wanted.keys()
    for key, values in wanted.items():
        assert got[key] == pytest.approx(values, rel=1e-5, abs=1e-6), key


def with_replay(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With completions from a file, where the case wants them."""
    if "replay" not in given:
        return given
    write_completions(folder / "completions.json")
    return given | {"replay": str(folder / "completions.json")}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("DPO", {"reference": "sharded"}),
        ("DPO", {"reference": "whole", "loss_type": ["ipo"]}),
        ("DPO", {"adapters": "fresh"}),
        ("DPO", {"adapters": "made"}),
        ("GRPO", {"replay": ""}),
        ("GRPO", {"replay": "", "adapters": "fresh", "beta": 0.1}),
        ("KTO", {"reference": "sharded", "loss_type": "apo_zero_unpaired"}),
        ("Reward", {}),
        ("Reward", {"adapters": "fresh"}),
    ],
)
def test_two_ranks_train_like_one_process(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    given = with_replay(given, tmp_path)
    whole = given | {"per_device_train_batch_size": 4}
    wanted = run_ranks(run_trl, 1, kind, str(tmp_path / "one"), 0, whole)[0]
    for ep in (2, 1):
        compare(run_ranks(run_trl, 2, kind, str(tmp_path / f"ep{ep}"), ep, given)[0], wanted)


def test_the_kl_term_of_kto_is_that_of_data_parallelism(tmp_path: Path) -> None:
    """It is estimated within the batch of a rank, so it is not that of one process."""
    wanted, got = (
        run_ranks(run_trl, 2, "KTO", str(tmp_path / f"{ep}"), ep, {"adapters": "fresh"})[0] for ep in (0, 2)
    )
    compare(got, wanted)


@pytest.mark.parametrize(
    ("kind", "given"),
    [("DPO", {"adapters": "fresh"}), ("DPO", {"reference": "sharded"}), ("GRPO", {"replay": ""})],
)
def test_a_killed_run_goes_on_as_if_never_stopped(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    given = with_replay(given, tmp_path) | {"save_strategy": "steps", "save_steps": 1}
    wanted = run_ranks(run_trl, 2, kind, str(tmp_path / "whole"), 2, given)[0]
    with pytest.raises(RankFailure):
        run_ranks(run_trl, 2, kind, str(tmp_path / "killed"), 2, given | {"kill": 2}, fresh=True)
    compare(run_ranks(run_trl, 2, kind, str(tmp_path / "killed"), 2, given, True)[0], wanted)


def generate(folder: str, ep: int, given: dict[str, Any]) -> dict[str, list[str]]:
    """What the model says to each prompt in a step of GRPO, always its likeliest token."""
    trainer = build_trainer("GRPO", folder, ep, {"top_k": 1, "max_steps": 1, "learning_rate": 0.0} | given)
    if ep:
        fsdmoe.prepare_trainer(trainer)
    trainer.train()
    return trainer.reward_funcs[0].said


@pytest.mark.parametrize("adapters", ["", "fresh"])
def test_grpo_generates_under_ep_what_one_process_generates(adapters: str, tmp_path: Path) -> None:
    given = {"adapters": adapters}
    (wanted,) = run_ranks(generate, 1, str(tmp_path / "one"), 0, given | {"per_device_train_batch_size": 4})
    first, second = run_ranks(generate, 2, str(tmp_path / "two"), 2, given)
    assert len(wanted) == 4
    assert first | second == wanted


def refused(kind: str, folder: str, given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fsdmoe.prepare_trainer(build_trainer(kind, folder, 2, given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "key"),
    [
        ("DPO", {"reference": "sharded", "sync_ref_model": True}, "sync_ref_model"),
        ("GRPO", {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ("DPO", {"adapters": "alone"}, "adapter"),
    ],
)
def test_what_sharding_does_otherwise_is_refused(
    kind: str, given: dict[str, Any], key: str, tmp_path: Path
) -> None:
    assert run_ranks(refused, 2, kind, str(tmp_path), given)[0].startswith(f"{key}: expected")
