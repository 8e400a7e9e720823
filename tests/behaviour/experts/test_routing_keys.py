"""Options of routing and experts as keys of ``train.py``: the same run on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdmoe.testing import run_ranks
from tests.support.token_run import STEPS, assert_same, course, write_documents

LATENT = {"model__moe_latent_size": 12, "model__n_shared_experts": 1, "model__shared_expert_gate": True}
# An expert chooses among the tokens of a rank's micro-batch: as many rows on one rank as on two.
CHOICE = {"experts__selection": "expert_choice", "experts__expert_choice__max_experts_per_token": 4}


def compare(tmp_path: Path, alone: dict[str, Any], several: dict[str, Any], steps: int = STEPS) -> None:
    """A run of one rank with a run of two."""
    data = write_documents(tmp_path)
    one = run_ranks(course, 1, str(tmp_path / "one"), data, alone)[0]
    two = run_ranks(course, 2, str(tmp_path / "two"), data, several | {"mesh__ep": 2})[0]
    assert_same(two, one, steps=steps)


def test_latent_experts_and_gated_shared_ones_train_alike_on_two_ranks(tmp_path: Path) -> None:
    compare(tmp_path, LATENT, LATENT)


def test_sequential_experts_train_as_grouped_ones_do(tmp_path: Path) -> None:
    compare(tmp_path, {}, {"experts__compute": "sequential"})


def test_expert_choice_trains_alike_on_two_ranks(tmp_path: Path) -> None:
    """The first step: later ones choose by logits that differ in their last bits, perhaps otherwise."""
    compare(tmp_path, CHOICE, CHOICE, steps=1)
