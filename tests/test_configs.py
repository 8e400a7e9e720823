"""The shipped configurations train as the papers and released config.json files of their models say."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.config import build_config, load_config
from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.memory_plan import PlannedMeshes, plan_memory
from fsdmoe.huggingface.folder import build_folder_model, hf_fields
from fsdmoe.huggingface.planned import split_wrapped
from fsdmoe.mesh import resolve_degrees
from fsdmoe.models import PRESETS
from fsdmoe.models.config import ModelConfig
from fsdmoe.testing import requires_peft, requires_transformers

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
    "qwen3-30b-a3b-lora": {},  # by the config.json of its model
    "qwen3-30b-a3b-qlora-24gb": {},
}

MARKS = {"qwen3-30b-a3b-lora": requires_transformers, "qwen3-30b-a3b-qlora-24gb": requires_transformers}
SWITCHES = ("device_scope", "family")  # say how, not how much


def test_every_configuration_is_looked_at() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(BALANCE)


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in BALANCE])
def test_experts_are_balanced_as_the_model_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    problems: list[str] = []
    written: dict[str, Any] = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    world = {"quickstart": 2, "qwen3-30b-a3b-lora": 1, "qwen3-30b-a3b-qlora-24gb": 1}.get(name, 256)
    config = build_config(written, {}, world, problems)
    assert config is not None, problems
    found = {key: value for key, value in vars(config.experts.balance).items() if value}
    assert {key: value for key, value in found.items() if key not in SWITCHES} == BALANCE[name]


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_the_dry_run_of_its_first_lines_needs_no_files_of_a_cluster(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    lines = [line for line in path.read_text().splitlines() if "--dry-run" in line]
    for line in lines:
        words = shlex.split(line, comments=False)
        assert load_config(words[words.index("train.py") + 1 :]).problems == ()


def test_deepseek_v3_trains_by_its_report() -> None:
    problems: list[str] = []
    config = build_config(tomllib.loads((CONFIGS / "deepseek-v3.toml").read_text()), {}, 256, problems)
    assert config is not None, problems
    optim = config.optim
    assert (optim.lr, optim.warmup_steps, optim.weight_decay, optim.grad_clip) == (2.2e-4, 2000, 0.1, 1.0)
    assert (optim.beta1, optim.beta2, config.model.initializer_range) == (0.9, 0.95, 0.006)
    assert (config.model.mtp_loss_coef, config.model.num_nextn_predict_layers) == (0.3, 1)


@pytest.mark.full
@requires_peft
def test_adapters_of_a_model_of_30_b_fit_one_gpu_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    problems: list[str] = []
    config = build_config(tomllib.loads((CONFIGS / "qwen3-30b-a3b-lora.toml").read_text()), {}, 1, problems)
    assert config is not None, problems
    folder = config.model.hf
    assert folder is not None
    model = build_folder_model(folder, config.adapter)
    preset = ModelConfig(**PRESETS["qwen3-30b-a3b"])
    for key, value in hf_fields(folder).items():
        assert value == getattr(preset, key), key
    degrees = resolve_degrees(config.mesh, 1)
    split_wrapped(model, PlannedMeshes(degrees))
    plan = plan_memory(model, degrees, FSDPPolicy(fsdp=config.fsdp, precision=config.precision))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert frozen == pytest.approx(30.53e9, rel=1e-3)
    assert plan.main_weights == pytest.approx(2 * frozen + 4 * trained, rel=1e-4), "frozen weights in bf16"
    assert plan.weights == pytest.approx(2 * trained, rel=1e-3), "and no copy of them"
    assert (plan.gradients, plan.moments) == pytest.approx((4 * trained, 8 * trained), rel=1e-3)
    assert plan.gather_slots == plan.grad_slots == 0
    assert plan.total < 64 * 2**30
