"""Every way in which peft can target a module, and everything that can be done with it: as in plain peft, or
refused by name before anything is split. Two ranks, experts split over them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdmoe.testing import requires_peft, run_ranks
from tests.support.peft_table import plain_row, sharded_row, verdicts
from tests.support.peft_targets import TARGETS

pytestmark = requires_peft
SAMPLE = "Conv1D and embedding"  # one of the two Conv1D is square
REFUSED = {
    "projection by parameter": r"adapter\.target_parameters: .* got weight of .*self_attn\.q_proj",
    "some tokens": r"got trainable_token_indices .* at model\.embed_tokens",
    "embedding, tied by peft": r"got lm_head\.lora_A.* in the memory of .* \(as ensure_weight_tying",
    "aLoRA": r"got the variant ALoraLinearVariant of LoRA .* at model\.layers\.0\.self_attn\.q_proj",
    "MiCA": r"got the variant MiCALinearVariant of LoRA",
}
"""The only rows that are not equal in every cell."""


@pytest.mark.parametrize(
    "name", [name if name == SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in TARGETS]
)
def test_adapters_of_a_sharded_model_do_what_peft_does_or_are_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    target = TARGETS[name]
    theirs = plain_row(target, tmp_path)
    mesh = {} if target.family in ("gpt2", "llama") else {"ep": 2}
    for ours in run_ranks(sharded_row, 2, target, tmp_path, mesh):
        found = verdicts(ours, theirs)
        if name in REFUSED:
            assert isinstance(found, str), f"expected a refusal, got {found}"
            assert re.match(rf"ConfigError: .*{REFUSED[name]}", found)
        else:
            assert found == dict.fromkeys(theirs, "equal")
