"""Every MoE family of the installed transformers: a folder, ``load=``, two steps, ``to_hf``, transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.checkpoint import to_hf
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.family_round_trip import round_trip, tokens_of
from tests.support.moe_families import MODEL_TYPES, installed, is_installed, tiny_model

pytestmark = requires_transformers

VERDICTS = dict.fromkeys(MODEL_TYPES, "ok")
"""What comes out: ``ok``, or the beginning of the refusal."""
QUICK = "minimax_m2"


@pytest.mark.parametrize(
    "family", ["granitemoe", "phimoe", "lfm2_moe", pytest.param("minimax_m2", marks=pytest.mark.full)]
)
def test_transformers_finds_all_weights_of_an_exported_family(tmp_path: Path, family: str) -> None:
    import transformers

    model = tiny_model(family)
    checkpoint.save(tmp_path / "checkpoint", model)
    to_hf(tmp_path / "checkpoint", tmp_path / "out")
    read, facts = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    tokens = tokens_of(0, 0)
    with torch.no_grad():
        expected, found = (each.eval()(input_ids=tokens).logits for each in (model, read))
    assert {key: names for key, names in facts.items() if names} == {}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.full
def test_every_installed_family_has_a_verdict() -> None:
    assert set(installed()) <= set(VERDICTS)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in MODEL_TYPES]
)
def test_a_family_goes_through_training_and_back_to_transformers_or_is_refused(
    tmp_path: Path, family: str
) -> None:
    if not is_installed(family):
        pytest.skip("the installed transformers has no such family")
    verdict = run_ranks(round_trip, 2, family, str(tmp_path))[0]
    assert verdict.startswith(VERDICTS[family]), verdict
