"""Options of routing and experts as keys of ``train.py``: the same run on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdmoe.testing import run_ranks
from tests.support.token_run import assert_same, course, write_documents

LATENT = {"model__moe_latent_size": 12, "model__n_shared_experts": 1, "model__shared_expert_gate": True}
# An expert chooses among the tokens of a rank's micro-batch: as many rows on one rank as on two.
CHOICE = {"experts__selection": "expert_choice", "experts__expert_choice__max_experts_per_token": 4}
KEYS = {
    "latent experts and gated shared ones": (LATENT, LATENT),
    "sequential experts": ({}, LATENT | {"experts__compute": "sequential"}),
    "expert choice": (CHOICE, CHOICE),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_gives_the_same_run_on_two_ranks(tmp_path: Path, name: str) -> None:
    data = write_documents(tmp_path)
    one, two = KEYS[name]
    if name == "sequential experts":
        one = {key: value for key, value in two.items() if key != "experts__compute"}
    alone = run_ranks(course, 1, str(tmp_path / "one"), data, one)[0]
    several = run_ranks(course, 2, str(tmp_path / "two"), data, two | {"mesh__ep": 2})[0]
    assert_same(several, alone)


def test_both_record_and_replay_are_refused(tmp_path: Path) -> None:
    both: dict[str, Any] = {"experts__record": tmp_path, "experts__replay": tmp_path}
    with pytest.raises(AssertionError, match="expected record or replay, got both"):
        run_ranks(course, 1, str(tmp_path / "one"), write_documents(tmp_path), both)
