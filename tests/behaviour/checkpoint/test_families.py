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
QUICK = ("phimoe", "minimax_m2")


@pytest.mark.parametrize("family", ["granitemoe", "minimax_m2", "phimoe", "lfm2_moe"])
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


def several(families: list[str], root: str) -> dict[str, str]:
    return {family: round_trip(family, f"{root}/{family}") for family in families}


def assert_verdicts(families: list[str], root: Path) -> None:
    found = run_ranks(several, 2, families, str(root))[0]
    assert {f: v for f, v in found.items() if not v.startswith(VERDICTS[f])} == {}


def test_families_go_through_training_and_back_to_transformers(tmp_path: Path) -> None:
    assert_verdicts(list(QUICK), tmp_path)


@pytest.mark.full
def test_every_installed_family_has_a_verdict() -> None:
    assert set(installed()) <= set(VERDICTS)


@pytest.mark.full
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_family_goes_through_training_and_back_to_transformers_or_is_refused(
    tmp_path: Path, family: str
) -> None:
    if not is_installed(family):
        pytest.skip("the installed transformers has no such family")
    assert_verdicts([family], tmp_path)
