"""A wrong section is refused by its keys, all of them together."""

import dataclasses

import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe import ObserveConfig


def test_the_defaults_are_valid_and_frozen():
    config = ObserveConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.log_interval = 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_interval", 0),
        ("heatmap_interval", -1),
        ("heatmap_columns", 1),
        ("profile_start", 0),
        ("profile_steps", 0),
        ("profile_ranks", (0, -1)),
        ("progress", "yes"),
        ("peak_precision", "int8"),
        ("peak_tflops", 0.0),
        ("peak_tflops", float("inf")),
    ],
)
def test_an_impossible_value_is_refused_by_its_dotted_key(key, value):
    with pytest.raises(ConfigError) as caught:
        ObserveConfig(**{key: value})
    assert str(caught.value).startswith(f"observe.{key}: expected ")
    assert "got " in str(caught.value)
    assert "; " in str(caught.value)


def test_several_wrong_values_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        ObserveConfig(log_interval=0, profile_steps=-2)
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "observe.log_interval",
        "observe.profile_steps",
    ]
