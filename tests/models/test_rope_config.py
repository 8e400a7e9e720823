"""The ``model.rope`` section: what it refuses, and how it is written."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fsdmoe.config import to_toml
from fsdmoe.core.errors import ConfigError
from fsdmoe.models import preset_config
from fsdmoe.models.rope_config import RopeConfig
from tests.support.config_building import build

LISTS: dict[str, Any] = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"type": "yarn"}, r"model\.rope\.factor: expected a value for rope\.type = yarn, got none"),
        ({"factor": 4.0}, r"model\.rope\.factor: expected no other key with rope\.type = default, got 4\.0"),
        ({"type": "linear", "factor": 0.5}, r"model\.rope\.factor: expected 1 or more, got 0\.5"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3.0}, r"model\.rope\.beta_fast: expected one of fac"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 1.0}, r"model\.rope\.beta_fast: expected more than"),
        ({"type": "yarn", "factor": 2.0, "attention_factor": 0.0}, r"model\.rope\.attention_factor: expe"),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
         r"model\.rope\.high_freq_factor: expected more than low_freq_factor = 4\.0"),
        ({"type": "longrope", **LISTS, "long_factor": (1.0, 0.0)}, r"model\.rope\.long_factor: expected num"),
    ],
)  # fmt: skip
def test_keys_that_a_type_does_not_read_or_cannot_use_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RopeConfig(**keys)


def test_a_model_refuses_what_does_not_fit_its_heads() -> None:
    with pytest.raises(ConfigError, match=r"rope\.long_factor: expected 4 numbers, one a rotary pair, got 3"):
        preset_config("tiny-qwen3", rope=RopeConfig(type="longrope", **LISTS | {"long_factor": (1.0,) * 3}))
    with pytest.raises(ConfigError, match=r"rope\.type: dynamic needs at least 4 rotary dimensions"):
        preset_config("tiny-qwen3", head_dim=2, rope=RopeConfig(type="dynamic", factor=2.0))
    with pytest.raises(ConfigError, match=r"partial_rotary_factor: expected 1: only glm4_moe has other"):
        preset_config("tiny-qwen3", partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match=r"head_dim: expected an even number for rotary .* got 6 times"):
        preset_config("tiny-glm-4.5", head_dim=6)


def test_a_table_or_the_command_line_scales_a_preset_and_survives_printing() -> None:
    model = {"preset": "tiny-qwen3", "rope": {"type": "yarn", "factor": 4, "beta_fast": "none"}}
    config, problems = build({"model": model})
    assert not problems
    assert config.model.rope == RopeConfig(type="yarn", factor=4.0)
    assert build(tomllib.loads(to_toml(config)))[0] == config
    written = build(model__preset="tiny-qwen3", model__rope__type="yarn", model__rope__factor="4")
    assert written[0].model.rope == config.model.rope
    assert build(model__rope__factr="4")[1][0].startswith("model.rope.factr: unknown key; did you mean")
