"""Who writes the name that a key has elsewhere, or a slip of one, is told the key."""

import re

import pytest

from fsdmoe.config.help import help_text
from fsdmoe.config.keys import all_keys
from fsdmoe.config.names_elsewhere import ALIASES, NOT_HERE, SECTIONS_ELSEWHERE
from fsdmoe.config.schema import SECTIONS
from fsdmoe.config.suggest import FLAGS, suggest, suggest_section

KEY = re.compile(rf"\b(?:{'|'.join(SECTIONS)})\.[a-z_0-9.]*[a-z_0-9]")


def test_every_alias_names_a_key_or_an_option_and_is_none_itself() -> None:
    names = {key.name for key in all_keys()}
    assert {meant.partition(" ")[0] for meant in ALIASES.values()} <= names | set(FLAGS)
    assert not names & (ALIASES.keys() | NOT_HERE.keys())
    assert set(SECTIONS_ELSEWHERE.values()) <= set(SECTIONS)
    assert not SECTIONS_ELSEWHERE.keys() & SECTIONS.keys()


def test_every_key_in_an_answer_is_one_and_no_name_has_two_answers() -> None:
    names = {key.name for key in all_keys()}
    found = {key for answer in [*ALIASES.values(), *NOT_HERE.values()] for key in KEY.findall(answer)}
    assert found <= names | {"train.py"}
    assert not ALIASES.keys() & NOT_HERE.keys()


def test_every_name_of_another_tool_gets_its_answer() -> None:
    for name, meant in ALIASES.items():
        assert suggest(name, FLAGS) == f"did you mean {meant}?"
    for name, reason in NOT_HERE.items():
        assert suggest(name.replace("_", "-"), FLAGS) == reason


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("moe-aux-loss-coeff", "experts.balance.micro_batch"),
        ("recompute-granularity", 'memory.recompute = ["layer"]'),
        ("moe-grouped-gemm", 'experts.compute ("grouped" is the default: leave it out)'),
        ("data.sample_packing", "data.pack"),
        ("load_in_4bit", 'precision.frozen_dtype = "nf4"'),
        ("model.model_name_or_path", "model.hf"),
        ("use_cpu_offload", "fsdp.cpu_offload"),
        ("bf16.enabled", 'precision.param_dtype = "bfloat16"'),
        ("zero_optimization.offload_optimizer.device", "fsdp.cpu_offload = true, or optim.state_offload"),
        ("optimizer.params.betas", "optim.beta1 and optim.beta2"),
        ("gradient_acumulation_steps", "train.global_batch_size"),
    ],
)
def test_options_and_tables_of_other_tools_are_told_the_key(written: str, meant: str) -> None:
    assert suggest(written, FLAGS).startswith(f"did you mean {meant}")


@pytest.mark.parametrize("name", ["moe_router_fancy_thing", "zzz", "tables.zzz", "activation_zzz", "num_x"])
def test_no_answer_sends_to_a_word_of_help_that_no_key_has(name: str) -> None:
    answer = suggest(name, FLAGS)
    word = answer.removeprefix("see --help ").partition(",")[0]
    assert answer.startswith("see --help for the sections") or help_text(word).startswith("--"), answer


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
    assert suggest("zzz", FLAGS) == "see --help for the sections, --help all for every key"


def test_sections_are_suggested_as_they_are_written_in_a_file() -> None:
    assert suggest_section("training") == "did you mean [train]?"
    assert suggest_section("lora") == "did you mean [adapter]?"
    assert suggest_section("optm") == "did you mean [optim]?"


def test_the_table_of_another_tool_is_gone_through_key_by_key() -> None:
    assert suggest_section("lr_scheduler", {"warmup_steps": 5}) == (
        "did you mean [optim]? warmup_steps is optim.warmup_steps"
    )
    answer = suggest_section("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert "; offload_optimizer.device is fsdp.cpu_offload = true, or optim.state_offload" in answer
    answer = suggest_section("training", {"seq_len": 8, "pipeline_parallel_degree": 2})
    assert answer.startswith("did you mean [train]? seq_len is data.seq_len; pipeline_parallel_degree: there")


def test_a_table_that_nobody_knows_is_told_all_sections() -> None:
    assert suggest_section("zzz", {"zzz": 1}) == f"choose one of {', '.join(SECTIONS)}"
