"""Rotary positions travel into config.json and back, in both spellings, and transformers reads the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from fsdmoe.checkpoint.hf_config import config_json, model_fields
from fsdmoe.checkpoint.hf_rope import read_rope
from fsdmoe.models.rope_config import RopeConfig
from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import rope_parameters, tiny

YARN = {"factor": 40, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
ROPES = [
    RopeConfig(),
    RopeConfig(type="linear", factor=2.0),
    RopeConfig(type="dynamic", factor=4.0),
    RopeConfig(type="yarn", **YARN, original_max_position_embeddings=4096, truncate=False),  # type: ignore[arg-type]
    RopeConfig(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=1024),
    RopeConfig(type="longrope", short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2.0, 3.0, 4.0, 5.5),
               original_max_position_embeddings=1024, attention_factor=1.25),
]  # fmt: skip


@requires_transformers
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.type)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_an_exported_config_comes_back_and_means_the_same_to_transformers(
    family: str, rope: RopeConfig
) -> None:
    import transformers

    head_dim = 16 if family == "glm4_moe" else 8  # half of it is rotated: four pairs either way
    ours = tiny(family, rope=rope, max_position_embeddings=8192, rope_theta=5e5, head_dim=head_dim)
    written = json.loads(json.dumps(config_json(json.loads(json.dumps(asdict(ours))))))
    back = model_fields(written)
    assert (back["rope"], back["rope_theta"], back["max_position_embeddings"]) == (rope, 5e5, 8192)
    assert back.get("partial_rotary_factor", 1.0) == ours.partial_rotary_factor
    theirs = transformers.AutoConfig.for_model(**written)
    kept = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    assert kept == rope_parameters(ours)
    assert model_fields(json.loads(theirs.to_json_string(use_diff=False)))["rope"] == rope


def test_heads_that_are_rotated_whole_are_said_to_the_family_whose_default_is_half() -> None:
    written = config_json(asdict(tiny("glm4_moe", partial_rotary_factor=1.0)))
    assert written["rope_parameters"]["partial_rotary_factor"] == 1.0
    assert model_fields(written)["partial_rotary_factor"] == 1.0
    del written["rope_parameters"], written["partial_rotary_factor"]
    assert model_fields(written)["partial_rotary_factor"] == 0.5


def test_both_spellings_and_both_names_of_the_type_are_read_alike() -> None:
    wanted = RopeConfig(type="yarn", **YARN)  # type: ignore[arg-type]
    for config in (
        {"rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 1e6},
        {"rope_scaling": YARN | {"rope_type": "yarn", "attention_factor": None}, "rope_theta": 1e6},
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6,
         "rope_scaling": YARN | {"rope_type": "yarn"}},
    ):  # fmt: skip
        found = read_rope(config)
        assert (found.rope, found.theta, found.problems) == (wanted, 1e6, []), config


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"rope_scaling": 4}, "rope_scaling: expected an object, got 4"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: expected a value"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor: not known"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
         "rope_scaling.mscale_all_dim: expected one of factor with rope.type = linear"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
         "rope_scaling.rope_type: expected the same as type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
         "rope_theta: expected next to rope_scaling"),
        ({"rope_theta": "1e4"}, "rope_theta: expected a number"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta: expected one base"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_sure_is_a_problem(config: dict[str, Any], problem: str) -> None:
    assert read_rope(config).problems[0].startswith(problem)
