"""The scripts in ``examples/`` do what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.scripts import started_ranks
from tests.support.trainer_case import forget_accelerate

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


def make_folder(folder: Path) -> None:
    """A tiny model with a tokenizer that has no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    tiny_hf("qwen3_moe").save_pretrained(folder)  # type: ignore[operator]


def test_generation_goes_on_with_a_plain_prompt_and_says_what_it_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path / "hf")
    answer = example("generate").main(str(tmp_path / "hf"), "w1 w2 w3")
    said, printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r".*hf: Qwen3MoeForCausalLM, [\d,]+ parameters, torch.float32, with a plain prompt", said
    )
    assert printed == answer
    assert re.fullmatch(r"(w\d+ ?)+", answer)


def test_generation_says_how_an_adapter_or_a_run_becomes_a_folder_for_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    for folder, command in (("adapter", "merge-adapter BASE"), ("run", "to-hf")):
        with pytest.raises(
            SystemExit, match=rf"{folder}: expected a Hugging Face folder.* {command} .*{folder} OUT"
        ):
            example("generate").main(str(tmp_path / folder), "w1")


def test_generation_looks_for_no_folder_of_this_disk_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit, match=r"found nothing there; did you mean .*/model\?"):
        example("generate").main(str(tmp_path / "modle"), "w1")


def test_generation_refuses_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_hf("qwen3_moe").save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    with pytest.raises(SystemExit, match=r"hf: expected a tokenizer.*--config-from.*train\.sample_prompts"):
        example("generate").main(str(tmp_path / "hf"), "w1")


def test_the_tiny_model_takes_the_place_of_no_other(tmp_path: Path) -> None:
    """Many pages have the reader write it to ``tutorial/model``, where they may have put their own."""
    example("make_tiny_model").main(str(tmp_path / "model"))
    example("make_tiny_model").main(str(tmp_path / "model"))
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 151936}')
    (tmp_path / "model/model-00001-of-00016.safetensors").write_text("weights")
    with pytest.raises(SystemExit, match="got another model; name another"):
        example("make_tiny_model").main(str(tmp_path / "model"))
    assert (tmp_path / "model/model-00001-of-00016.safetensors").exists()


def test_fine_tuning_a_folder_leaves_a_checkpoint(tmp_path: Path) -> None:
    make_folder(tmp_path / "hf")
    (tmp_path / "text.txt").write_text(" ".join(f"w{n % 64}" for n in range(200)))
    assert "manifest.json" in run_ranks(run_finetune, 2, str(tmp_path))[0]


# Reinforcement learning


def run_rl(steps: int, limit: float) -> str:
    """What the first rank printed."""
    with started_ranks(2, "examples/rl_loop.py", str(steps)) as ranks:
        for rank in ranks:
            assert rank.wait(limit) == 0, rank.stdout + rank.stderr
        return ranks[0].stdout


@pytest.mark.full  # what it is made of has tests of its own: refit, links between processes, released memory
def test_reinforcement_learning_keeps_both_sides_equal() -> None:
    printed = run_rl(2, 120)
    assert "weights equal bit for bit after 2 of 2 refits" in printed, printed
    assert re.search(r"[1-9]\d* KiB lent to each generation", printed), printed


@pytest.mark.full
def test_reinforcement_learning_raises_its_reward() -> None:
    printed = run_rl(example("rl_loop").STEPS, 300)
    first, last = re.findall(r"reward ([0-9.]+) -> ([0-9.]+)", printed)[0]
    assert float(first) <= 0.2, printed
    assert float(last) >= 0.9, printed


# Inside trainers


def requires(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")


def run_inside(name: str, folder: str, steps: int) -> list[float]:
    """The example on this rank; the losses that it logged."""
    forget_accelerate()
    sys.path.insert(0, str(ROOT / "examples"))  # as when it is started: examples share a tokenizer
    losses = example(name).main(folder, steps)
    if losses is not None:
        return losses
    history = json.loads(Path(folder, f"checkpoint-{steps}/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hf_trainer", marks=requires("accelerate")),
        pytest.param("sft_trainer", marks=requires("accelerate", "trl")),
    ],
)
def test_a_trainer_goes_on_from_its_checkpoint_and_leaves_a_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = run_ranks(run_inside, 2, name, str(tmp_path), 8)[0]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    shutil.rmtree(tmp_path / "checkpoint-8")
    assert run_ranks(run_inside, 2, name, str(tmp_path), 8)[0] == pytest.approx(losses, rel=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "qwen3_moe"


@pytest.mark.full
@requires("accelerate", "trl", "peft")
@pytest.mark.parametrize(
    ("name", "left"),
    [("dpo_trainer", "adapter_model.safetensors"), ("grpo_trainer", "model.safetensors")],
)
def test_a_trainer_of_preferences_goes_on_from_its_checkpoint(name: str, left: str, tmp_path: Path) -> None:
    losses = run_ranks(run_inside, 2, name, str(tmp_path), 6)[0]
    assert len(set(losses)) == 6
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert run_ranks(run_inside, 2, name, str(tmp_path), 6)[0] == pytest.approx(losses, rel=1e-5)
    assert (tmp_path / "model" / left).exists()


@pytest.mark.full
@requires("accelerate")
def test_a_loop_with_accelerate_goes_on_from_its_state(tmp_path: Path) -> None:
    losses = run_ranks(run_inside, 2, "accelerate_loop", str(tmp_path / "whole"), 6)[0]
    for steps, part in ((2, losses[:4]), (6, losses[4:])):
        found = run_ranks(run_inside, 2, "accelerate_loop", str(tmp_path / "parts"), steps)[0]
        assert found == pytest.approx(part, rel=1e-5)
