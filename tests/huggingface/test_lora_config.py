"""What the adapter section refuses, before anything is built."""

import pytest

from fsdmoe.config.values import build_section, parse_override
from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.lora_config import AdapterConfig


def test_adapters_are_off_unless_a_rank_is_set() -> None:
    assert not AdapterConfig().is_on
    assert AdapterConfig(rank=8).is_on
    assert not AdapterConfig(rank=8, kind="none").is_on


def test_dora_leaves_experts_alone_by_default() -> None:
    assert AdapterConfig(rank=8).adapts_experts
    assert not AdapterConfig(rank=8, kind="dora").adapts_experts
    assert not AdapterConfig(rank=8, target_parameters=()).adapts_experts


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": -1}, r"adapter\.rank: expected 0 \(no adapters\) or more, got -1"),
        ({"dropout": 1.0}, r"adapter\.dropout: expected at least 0 and less than 1"),
        ({"rank": 8, "dropout": 0.1}, r"adapter\.dropout: expected 0 with adapters on fused experts"),
        (
            {"rank": 8, "kind": "dora", "target_parameters": ("mlp.experts.down_proj",)},
            r"adapter\.kind: expected lora .* set adapter\.target_parameters = \[\]",
        ),
        (
            {"rank": 8, "target_modules": ("all-linear",), "target_parameters": ()},
            r"adapter\.target_modules: expected all-linear alone and without adapter\.target_parameters",
        ),
    ],
)
def test_what_peft_does_not_have_is_refused_by_its_key(keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**keys)


def test_lists_of_names_are_written_with_commas_on_the_command_line() -> None:
    values: dict = {}
    problems: list[str] = []
    parse_override(values, AdapterConfig, "adapter.target_modules", "q_proj,v_proj", problems)
    parse_override(values, AdapterConfig, "adapter.target_parameters", "[]", problems)
    section = build_section(AdapterConfig, values, "adapter", problems)
    assert not problems
    assert section == AdapterConfig(target_modules=("q_proj", "v_proj"), target_parameters=())
