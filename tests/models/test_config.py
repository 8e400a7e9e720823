"""The ``model`` section: windows, and a preset that has a table of its own."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from fsdmoe.config import to_toml
from fsdmoe.core.errors import ConfigError
from fsdmoe.models import preset_config
from fsdmoe.models.rope_config import PLAIN_ROPE
from tests.support.config_building import build


def test_layers_take_turns_unless_their_types_are_written() -> None:
    config = preset_config("tiny-gpt-oss", num_hidden_layers=4)
    assert [config.window_of(layer) for layer in range(4)] == [8, None, 8, None]
    kinds = ("full_attention", "full_attention", "sliding_attention", "full_attention")
    config = dataclasses.replace(config, layer_types=kinds)
    assert [config.window_of(layer) for layer in range(4)] == [None, None, 8, None]
    assert dataclasses.replace(config, sliding_window=None).num_window_layers == 0


def test_windows_are_refused_where_no_layer_has_them_and_types_where_they_do_not_count() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.sliding_window: expected none, for only gpt_oss has window"
    ):
        preset_config("tiny-qwen3", sliding_window=8)
    with pytest.raises(ConfigError, match=r"model\.sliding_window: expected a positive number below 2\*\*31"):
        preset_config("tiny-gpt-oss", sliding_window=0)
    with pytest.raises(
        ConfigError, match=r"model\.layer_types: expected one of each of num_hidden_layers = 2"
    ):
        preset_config("tiny-gpt-oss", layer_types=("full_attention",))


def test_the_scaling_of_a_preset_is_changed_key_by_key_or_replaced_by_another_kind() -> None:
    own = preset_config("gpt-oss-20b").rope
    config, problems = build(model__preset="gpt-oss-20b", model__rope__factor="64")
    assert not problems
    assert config.model.rope == dataclasses.replace(own, factor=64.0)
    assert build(tomllib.loads(to_toml(config)))[0] == config
    plain, problems = build(model__preset="gpt-oss-20b", model__rope__type="default")
    assert not problems
    assert plain.model.rope == PLAIN_ROPE
