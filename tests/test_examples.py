"""The scripts in ``examples/`` do what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.mesh import build_meshes
from fsdmoe.parallel import parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.scripts import started_ranks

ROOT = Path(__file__).parent.parent
pytestmark = requires_transformers


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_own_loop() -> float:
    return example("own_loop").main()


def test_a_loop_of_ones_own_trains_and_sends_its_weights() -> None:
    losses = run_ranks(run_own_loop, 2)
    assert all(0 < loss < 10 for loss in losses)


def run_finetune(folder: str) -> list[str]:
    script = example("finetune")
    script.SEQUENCE, script.STEPS = 16, 3
    with contextlib.chdir(folder):
        script.main("hf", "text.txt", 2)
    return sorted(os.listdir(Path(folder, "finetuned")))


def test_fine_tuning_a_folder_leaves_a_checkpoint(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "hf")
    tiny_hf("qwen3_moe").save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    (tmp_path / "text.txt").write_text(" ".join(f"w{n % 64}" for n in range(200)))
    assert "manifest.json" in run_ranks(run_finetune, 2, str(tmp_path))[0]


# Reinforcement learning


def run_rl(steps: int, limit: float) -> str:
    """What the first rank printed."""
    with started_ranks(2, "examples/rl_loop.py", str(steps)) as ranks:
        for rank in ranks:
            assert rank.wait(limit) == 0, rank.stdout + rank.stderr
        return ranks[0].stdout


def test_reinforcement_learning_keeps_both_sides_equal() -> None:
    printed = run_rl(2, 120)
    assert "weights equal bit for bit after 2 of 2 refits" in printed, printed


@pytest.mark.full
def test_reinforcement_learning_raises_its_reward() -> None:
    printed = run_rl(example("rl_loop").STEPS, 300)
    first, last = re.findall(r"reward ([0-9.]+) -> ([0-9.]+)", printed)[0]
    assert float(first) <= 0.2, printed
    assert float(last) >= 0.9, printed


# Inside transformers.Trainer

requires_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate: pip install accelerate"
)


def run_trainer(folder: Path, steps: int) -> list[dict[str, float]]:
    """The example on two ranks; what it logged."""
    with started_ranks(2, "examples/hf_trainer.py", str(folder), str(steps)) as ranks:
        for rank in ranks:
            assert rank.wait(300) == 0, rank.stdout + rank.stderr
    return json.loads((folder / f"checkpoint-{steps}/trainer_state.json").read_text())["log_history"]


def initial_weights() -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(example("hf_trainer").CONFIG)
    parallelize(model, build_meshes())
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def run_plain_trainer(folder: Path, steps: int) -> list[dict[str, float]]:
    """transformers' own Trainer in one process, on the batches of both ranks."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler

    script = example("hf_trainer")
    model = AutoModelForCausalLM.from_config(script.CONFIG)
    model.load_state_dict(run_ranks(initial_weights, 1)[0])
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    kept = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64 * 16).view(64, 16) % 128]
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        logging_steps=1, save_strategy="no", eval_strategy="steps", eval_steps=4, max_grad_norm=1.0,
        use_cpu=True, report_to="none",
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:8], optimizers=(optimizer, schedule)
    )
    trainer.train()
    return trainer.state.log_history


def logged(history: list[dict[str, float]], key: str) -> list[float]:
    return [entry[key] for entry in history if key in entry]


@pytest.mark.full
@requires_accelerate
def test_a_wrapped_model_trains_and_resumes_inside_trainer_as_a_plain_one_does(tmp_path: Path) -> None:
    got = run_trainer(tmp_path / "wrapped", 8)
    plain = run_plain_trainer(tmp_path / "plain", 8)
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert logged(got, key) == pytest.approx(logged(plain, key), rel=1e-4), key
    assert len(logged(got, "loss")) == 8
    shutil.rmtree(tmp_path / "wrapped/checkpoint-8")
    assert logged(run_trainer(tmp_path / "wrapped", 8), "loss") == pytest.approx(
        logged(got, "loss"), rel=1e-5
    )
