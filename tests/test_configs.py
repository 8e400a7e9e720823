"""The shipped configurations train as the papers and released config.json files of their models say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.config import build_config

CONFIGS = Path(__file__).parent.parent / "configs"

# DeepSeek-V3: technical report, 4.2. Qwen3: technical report (balance over the global batch), and
# router_aux_loss_coef of the released config.json, as for Mixtral.
BALANCE: dict[str, dict[str, float]] = {
    "deepseek-v3": {"bias_rate": 0.001, "sequence": 0.0001},
    "mixtral-8x22b": {"transformers": 0.001},
    "quickstart": {"sequence": 0.01},
    "qwen3-235b-a22b": {"global_batch": 0.001},
    "qwen3-30b-a3b": {"global_batch": 0.001},
    "qwen3-30b-a3b-128k": {"global_batch": 0.001},
}


def test_every_configuration_is_looked_at() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(BALANCE)


@pytest.mark.parametrize("name", BALANCE)
def test_experts_are_balanced_as_the_model_was(name: str) -> None:
    problems: list[str] = []
    written: dict[str, Any] = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    config = build_config(written, {}, 2 if name == "quickstart" else 256, problems)
    assert config is not None, problems
    found = {key: value for key, value in vars(config.experts.balance).items() if value}
    assert {key: value for key, value in found.items() if key != "device_scope"} == BALANCE[name]


def test_deepseek_v3_trains_by_its_report() -> None:
    problems: list[str] = []
    config = build_config(tomllib.loads((CONFIGS / "deepseek-v3.toml").read_text()), {}, 256, problems)
    assert config is not None, problems
    optim = config.optim
    assert (optim.lr, optim.warmup_steps, optim.weight_decay, optim.grad_clip) == (2.2e-4, 2000, 0.1, 1.0)
    assert (optim.beta1, optim.beta2, config.model.initializer_range) == (0.9, 0.95, 0.006)
    assert (config.model.mtp_loss_coef, config.model.num_nextn_predict_layers) == (0.3, 1)
