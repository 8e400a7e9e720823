"""LoRA and DoRA on every mesh against peft in one process: gradients of each factor, and several steps."""

from __future__ import annotations

import functools
import itertools

import pytest

from fsdmoe.testing import requires_peft, run_ranks
from tests.support.lora_case import Steps, alone, differences, wrapped

pytestmark = [requires_peft, pytest.mark.full]
STEPS = 4
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 1": (2, {}),
    "ep 2": (4, {"ep": 2}),
    "ep 4": (4, {"ep": 4}),
    "etp 2": (4, {"etp": 2}),
    "ep 2 etp 2": (4, {"ep": 2, "etp": 2}),
    "tp 2": (4, {"tp": 2, "ep": 2}),
    "dp_outer 2": (4, {"dp_outer": 2, "etp": 2}),
}


@functools.cache
def reference(family: str, kind: str, optimizer: str) -> Steps:
    return alone(family, kind, optimizer, STEPS)


# The attention of gpt-oss is not split over tp, with or without adapters.
CASES = [case for case in itertools.product(FAMILIES, MESHES) if case != ("gpt_oss", "tp 2")]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_lora_on_attention_and_experts_equals_peft_alone(family: str, mesh: str, optimizer: str) -> None:
    world, degrees = MESHES[mesh]
    got = run_ranks(wrapped, world, family, "lora", optimizer, STEPS, degrees)
    found = differences(reference(family, "lora", optimizer), got[0])
    assert found["gradients"] <= 1e-5
    assert found["losses"] <= 1e-5
    # AdamW's first steps divide by the size of a gradient, so rounding counts where that is near zero.
    assert found["adapters"] <= (1e-5 if optimizer == "sgd" else 1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("mesh", ["ep 2", "tp 2"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_dora_on_attention_equals_peft_alone(family: str, mesh: str, optimizer: str) -> None:
    world, degrees = MESHES[mesh]
    got = run_ranks(wrapped, world, family, "dora", optimizer, STEPS, degrees)
    found = differences(reference(family, "dora", optimizer), got[0])
    assert found["gradients"] <= 1e-5
    assert found["losses"] <= 1e-5
    assert found["adapters"] <= (1e-5 if optimizer == "sgd" else 1e-3)
