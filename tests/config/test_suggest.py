"""Who writes the name that a key has elsewhere, or a slip of one, is told the key."""

import pytest

from fsdmoe.config.keys import all_keys
from fsdmoe.config.suggest import ALIASES, FLAGS, suggest, suggest_section


def test_every_alias_names_a_key_or_an_option_and_is_none_itself() -> None:
    names = {key.name for key in all_keys()}
    assert {meant.partition(" ")[0] for meant in ALIASES.values()} <= names | set(FLAGS)
    assert not names & ALIASES.keys()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.num_layers", "model.num_hidden_layers"),
        ("optim.steps", "train.steps"),
        ("experts.balance.sequnce", "experts.balance.sequence"),
        ("dta.seq_len", "data.seq_len"),
        ("train.output-dir", "train.output_dir"),
        ("evaluate_only", "--evaluate-only"),
        ("print-confg", "--print-config"),
        ("interval", "checkpoint.interval"),
    ],
)
def test_slips_and_keys_of_other_sections_are_told_the_key(written: str, meant: str) -> None:
    assert suggest(written, FLAGS) == f"did you mean {meant}?"


def test_what_nobody_can_guess_is_sent_to_the_help() -> None:
    assert suggest("train.zzz") == "see --help train"
    assert suggest("zzz", FLAGS) == "see --help zzz, or --help"


def test_sections_are_suggested_as_they_are_written_in_a_file() -> None:
    assert suggest_section("training") == "did you mean [train]?"
    assert suggest_section("lora") == "did you mean [adapter]?"
    assert suggest_section("optm") == "did you mean [optim]?"
