"""The loss scale by itself: how it moves, what it says, which keys set it."""

import logging
import math

import pytest
import torch

from fsdmoe.config import build_config, to_toml
from fsdmoe.core.errors import ConfigError
from fsdmoe.precision import LossScaleConfig, LossScaler, PrecisionConfig


def test_it_grows_after_an_interval_of_finite_steps_and_falls_at_once() -> None:
    scaler = LossScaler(
        LossScaleConfig(initial=1024, growth_interval=3, growth_factor=4, backoff_factor=0.25)
    )
    seen = []
    for norm in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0):
        assert scaler.update(norm) == math.isfinite(norm)
        seen.append(scaler.value)
    assert seen == [1024, 1024, 256, 256, 256, 1024, 256, 256]
    assert scaler.num_skipped == 2


def test_it_multiplies_the_loss_and_takes_the_norm_from_the_device() -> None:
    scaler, loss = LossScaler(LossScaleConfig(initial=8)), torch.tensor(0.5, requires_grad=True)
    scaler.scale(loss).backward()
    assert loss.grad == 8
    assert scaler.update(torch.tensor(3.0))
    assert not scaler.update(torch.tensor(math.inf))
    assert scaler.value == 4


def test_it_stays_above_its_minimum_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    scaler = LossScaler(LossScaleConfig(initial=6, minimum=2))
    fell = []
    for _ in range(4):
        scaler.update(math.inf)
        fell.append(scaler.fell)
    assert scaler.value == 2
    assert fell == [True, True, False, False]
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    assert "precision.loss_scale.minimum" in caplog.text


def test_a_static_scale_never_moves() -> None:
    scaler = LossScaler(LossScaleConfig(initial=64, growth_interval=0))
    assert [scaler.update(n) for n in (1.0, math.inf, 1.0)] == [True, False, True]
    assert (scaler.value, scaler.num_skipped, scaler.fell) == (64, 1, False)


def test_gradients_that_are_all_zero_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    scaler = LossScaler()
    for _ in range(3):
        assert scaler.update(0.0)
    assert len(caplog.records) == 1
    assert "every gradient is exactly zero" in caplog.text


def test_the_first_scale_follows_the_tokens_that_the_loss_is_a_mean_over() -> None:
    assert LossScaler().value == 65536
    assert LossScaler(num_tokens=4096).value == 4096
    assert LossScaler(num_tokens=4_000_000).value == 2**22
    assert LossScaler(LossScaleConfig(initial=3), num_tokens=4096).value == 3


def test_its_state_goes_on_where_it_was_and_a_static_scale_is_the_configurations() -> None:
    scaler = LossScaler(LossScaleConfig(initial=16, growth_interval=2))
    for norm in (1.0, 1.0, math.inf, 1.0):
        scaler.update(norm)
    state = scaler.state_dict()
    other = LossScaler(LossScaleConfig(initial=1, growth_interval=2))
    other.load_state_dict(state)
    assert (other.value, other.num_skipped) == (16, 1)
    other.update(1.0)
    assert other.value == 32
    static = LossScaler(LossScaleConfig(initial=8, growth_interval=0))
    static.load_state_dict(state)
    assert static.value == 8


@pytest.mark.parametrize("state", [{}, {"value": 8.0, "num_finite": 1, "num_skipped": 2}])
def test_in_other_formats_it_does_nothing(state: dict[str, float]) -> None:
    scaler, loss = PrecisionConfig().build_scaler(num_tokens=4096), torch.ones(())
    scaler.load_state_dict(state)
    assert scaler.scale(loss) is loss
    assert [scaler.update(n) for n in (1.0, math.inf)] == [True, False]
    assert (scaler.value, scaler.fell, scaler.state_dict()) == (1.0, False, {})
    for formats in ({"param_dtype": "float16"}, {"reduce_dtype": "float16"}):
        assert PrecisionConfig(**formats).build_scaler(num_tokens=100).value == 128  # type: ignore[arg-type]


def test_the_command_line_sets_every_key_and_toml_reads_them_back() -> None:
    problems: list[str] = []
    keys = {"initial": "256", "growth_interval": "5", "growth_factor": "4", "backoff_factor": "0.25"}
    given: dict[str, str | None] = {f"precision.loss_scale.{key}": text for key, text in keys.items()}
    config = build_config({}, given | {"precision.loss_scale.minimum": "2"}, 1, problems)
    assert config is not None, problems
    assert config.precision.loss_scale == LossScaleConfig(
        initial=256, growth_interval=5, growth_factor=4, backoff_factor=0.25, minimum=2
    )
    assert "[precision.loss_scale]\ninitial = 256.0" in to_toml(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("initial", 0.5), ("initial", math.nan), ("growth_interval", -1), ("growth_factor", 1.0),
        ("backoff_factor", 1.0), ("backoff_factor", 0.0), ("minimum", 0.0),
    ],
)  # fmt: skip
def test_a_key_that_makes_no_sense_is_refused_by_its_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"precision.loss_scale.{key}: expected .*, got {value}"):
        LossScaleConfig(**{key: value})  # type: ignore[arg-type]
