"""A sharded model inside transformers' and TRL's trainers is trained as an unsharded one under data
parallelism, and a killed run goes on as if never stopped."""

from __future__ import annotations

import importlib.util
import os
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdmoe
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import RankFailure, requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.trainer_case import (
    Rows,
    arguments,
    forget_accelerate,
    kill_at,
    logged,
    made_model,
    weights_of,
)

pytestmark = [
    requires_transformers,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate"),
    pytest.mark.full,  # seconds of imports on every rank; tests/huggingface/test_accelerator.py is quick
]
requires_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft")
requires_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="pip install trl")

Found = tuple[dict[str, list[float]], dict[str, torch.Tensor]]
KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "entropy", "mean_token_accuracy", "aux_loss")


def run(folder: str, sharded: bool, changes: dict[str, Any], kill: int = -1, resume: bool = False) -> Found:
    from transformers import Trainer

    forget_accelerate()
    changes = dict(changes)
    model = made_model(sharded, **changes.pop("model", {}))
    trainer = Trainer(
        model, arguments(folder, **changes), train_dataset=Rows(30), eval_dataset=Rows(11),
        callbacks=[kill_at(kill)],
    )  # fmt: skip
    return outcome(trainer, sharded, resume)


def run_sft(
    folder: str, sharded: bool, changes: dict[str, Any], kill: int = -1, resume: bool = False
) -> Found:
    """Packed conversations with tools; a loss on the assistant's words alone; layers are run again."""
    from trl import SFTConfig, SFTTrainer

    from examples.sft_trainer import build_conversations, build_tokenizer

    forget_accelerate()
    model = made_model(sharded, vocab_size=128)
    own = {"max_length": 32, "packing": True, "assistant_only_loss": True, "bf16": False}
    trainer = SFTTrainer(
        model, arguments(folder, SFTConfig, **own, **changes), train_dataset=build_conversations(80),
        eval_dataset=build_conversations(9), processing_class=build_tokenizer(), callbacks=[kill_at(kill)],
    )  # fmt: skip
    return outcome(trainer, sharded, resume)


def run_lora(
    folder: str, sharded: bool, changes: dict[str, Any], kill: int = -1, resume: bool = False
) -> Found:
    """Adapters alone are trained, and saved as PEFT saves them."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    forget_accelerate()
    adapters = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(made_model(False), adapters)  # type: ignore[arg-type]
    if sharded:
        fsdmoe.parallelize(model, fsdmoe.build_meshes(ep=2))
    trainer = Trainer(
        model, arguments(folder, **changes), train_dataset=Rows(30), eval_dataset=Rows(11),
        callbacks=[kill_at(kill)],
    )  # fmt: skip
    found = outcome(trainer, sharded, resume)
    trainer.save_model(folder)
    return found[0], {name: value for name, value in found[1].items() if "lora" in name}


def outcome(trainer: Any, sharded: bool, resume: bool) -> Found:
    if sharded:
        fsdmoe.prepare_trainer(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return {key: logged(trainer, key) for key in KEYS}, weights_of(trainer.model)


def compare(got: Found, wanted: Found) -> None:
    for key, values in wanted[0].items():
        assert got[0][key] == pytest.approx(values, rel=1e-5), key
    for name, value in wanted[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "case",
    [run, pytest.param(run_sft, marks=requires_trl), pytest.param(run_lora, marks=requires_peft)],
)
def test_losses_norms_and_weights_are_those_of_data_parallelism(case: Any, tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    got = run_ranks(case, 2, str(tmp_path / "a"), True, changes)[0]
    wanted = run_ranks(case, 2, str(tmp_path / "b"), False, changes)[0]
    assert len(wanted[0]["loss"]) == 5
    assert len(wanted[0]["eval_loss"]) > 1
    assert max(wanted[0]["grad_norm"]) > 0.5  # it was clipped
    compare(got, wanted)


@requires_peft
def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for sharded in (True, False):
        run_ranks(run_lora, 2, str(tmp_path / str(sharded)), sharded, {"max_steps": 2})
    got, wanted = (
        load_file(tmp_path / str(sharded) / "adapter_model.safetensors") for sharded in (True, False)
    )
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "case",
    [run, pytest.param(run_sft, marks=requires_trl), pytest.param(run_lora, marks=requires_peft)],
)
def test_a_killed_run_goes_on_as_if_never_stopped(case: Any, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2}
    whole = run_ranks(case, 2, str(tmp_path / "whole"), True, changes)[0]
    with pytest.raises(RankFailure):
        run_ranks(case, 2, str(tmp_path / "killed"), True, changes, 3, fresh=True)
    compare(run_ranks(case, 2, str(tmp_path / "killed"), True, changes, -1, True)[0], whole)
    assert len(whole[0]["loss"]) == 5


def test_a_run_resumes_on_other_ranks_and_another_ep(tmp_path: Path) -> None:
    """Half as many rows on twice as many ranks are the same step, the auxiliary loss of each rank aside."""
    changes: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "model": {"output_router_logits": False},
    }
    whole = run_ranks(run, 2, str(tmp_path), True, changes)[0]
    for step in (4, 5):
        os.rename(tmp_path / f"checkpoint-{step}", tmp_path / f"later-{step}")
    changes |= {"per_device_train_batch_size": 1, "model": {"output_router_logits": False, "ep": 4}}
    compare(run_ranks(run, 4, str(tmp_path), True, changes, -1, True)[0], whole)
    changes["max_steps"] = 6
    assert not run_ranks(warnings_of_rows, 4, str(tmp_path), changes)[0]
    changes["per_device_train_batch_size"] = 2
    (line,) = run_ranks(warnings_of_rows, 4, str(tmp_path), changes)[0]
    assert "checkpoint-6: its steps had 8 rows, this run's have 16, so some rows are left out" in line


def warnings_of_rows(folder: str, changes: dict[str, Any]) -> list[str]:
    with mock.patch("fsdmoe.huggingface.trainer.logger.warning") as said:
        run(folder, True, changes, -1, True)
    return [call.args[0] % call.args[1:] for call in said.call_args_list]


def run_best(folder: str) -> tuple[list[float], float, int]:
    """A learning rate that spoils the model: training stops early, and the best weights come back."""
    from transformers import EarlyStoppingCallback, Trainer

    forget_accelerate()
    given = arguments(
        folder, max_steps=12, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        learning_rate=0.3, load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=2,
    )  # fmt: skip
    trainer: Any = fsdmoe.prepare_trainer(
        Trainer(
            made_model(True), given, train_dataset=Rows(30), eval_dataset=Rows(11),
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        )
    )  # fmt: skip
    trainer.train()
    evaluated = logged(trainer, "eval_loss")
    return evaluated, trainer.evaluate()["eval_loss"], trainer.state.global_step


def test_the_best_model_is_loaded_when_training_stops_early(tmp_path: Path) -> None:
    (evaluated, last, step), other = run_ranks(run_best, 2, str(tmp_path))
    assert (evaluated, last, step) == other
    assert step < 12
    assert len(evaluated) == step
    assert last == pytest.approx(min(evaluated), rel=1e-6) != evaluated[-1]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def save(folder: str) -> tuple[dict[str, torch.Tensor], float]:
    from transformers import Trainer

    forget_accelerate()
    model = made_model(True, dtype="float32")
    trainer: Any = fsdmoe.prepare_trainer(Trainer(model, arguments(folder), train_dataset=Rows(8)))
    trainer.save_model()
    given = Rows(1)[0]
    model.eval()
    return weights_of(model), model(given["input_ids"][None], labels=given["labels"][None]).loss.item()


def test_save_model_writes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights, loss = run_ranks(save, 2, str(tmp_path))[0]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    given = Rows(1)[0]
    found = model.eval()(given["input_ids"][None], labels=given["labels"][None]).loss.item()
    assert found == pytest.approx(loss, rel=1e-5)


def push(folder: str) -> tuple[list[str], Any, Any]:
    """What is uploaded, with routers' biases that bfloat16 cannot hold."""
    from transformers import Trainer

    forget_accelerate()
    model: Any = fsdmoe.parallelize(tiny_hf("deepseek_v3"), fsdmoe.build_meshes(ep=2))
    model.config.dtype = torch.bfloat16
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.fill_(7.81)
    trainer: Any = fsdmoe.prepare_trainer(Trainer(model, arguments(folder), train_dataset=Rows(8)))
    trainer.hub_model_id, uploaded = "somebody/model", []
    hub = types.SimpleNamespace(upload_folder=lambda **given: uploaded.extend(sorted(os.listdir(folder))))
    with mock.patch("transformers.trainer.hf_api", return_value=hub):
        trainer.push_to_hub()
    weights = weights_of(model)
    return uploaded, weights["lm_head.weight"], 7.81


def test_what_is_pushed_is_the_whole_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    uploaded, head, bias = run_ranks(push, 2, str(tmp_path))[0]
    assert {"config.json", "model.safetensors", "README.md"} <= {*uploaded}
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], head.bfloat16())
    (found,) = {value.unique().item() for name, value in saved.items() if name.endswith("correction_bias")}
    assert found == pytest.approx(bias, rel=1e-6)


def run_uneven(folder: str) -> None:
    """Each rank has rows of its own; the second runs out first."""
    from transformers import Trainer

    class OwnRows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from (Rows(30)[index] for index in range(14 if dist.get_rank() == 0 else 6))

    forget_accelerate()
    trainer: Any = fsdmoe.prepare_trainer(
        Trainer(made_model(True), arguments(folder), train_dataset=OwnRows())
    )
    loader = torch.utils.data.DataLoader(OwnRows(), batch_size=2)
    trainer.get_train_dataloader = lambda: loader
    trainer.train()


def test_ranks_that_run_out_of_batches_end_all_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(run_uneven, 2, str(tmp_path))
    assert str(caught.value).count("ConfigError: train_dataset: expected as many batches on every rank") == 2
    assert "rank 1 has 1 more" in str(caught.value)


def refused(folder: str, mesh: dict[str, int], changes: dict[str, Any], divisor: float | None) -> str:
    from transformers import Trainer
    from transformers.trainer_utils import HubStrategy

    forget_accelerate()
    model: Any = made_model(False)
    if mesh:
        policy = fsdmoe.ParallelPolicy(
            precision=fsdmoe.PrecisionConfig(param_dtype="float32"), grad_divisor=divisor
        )
        fsdmoe.parallelize(model, fsdmoe.build_meshes(**mesh), policy)
    late = {key: changes.pop(key) for key in ("push_to_hub", "hub_strategy") if key in changes}
    trainer: Any = Trainer(model, arguments(folder, **changes), train_dataset=Rows(8))
    for key, value in late.items():  # a trainer that is made with them calls the Hub
        setattr(trainer.args, key, HubStrategy(value) if key == "hub_strategy" else value)
    with pytest.raises(ConfigError) as caught:
        fsdmoe.prepare_trainer(trainer).train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "changes", "divisor", "key"),
    [
        ({}, {}, None, "trainer.model"),
        ({"tp": 2}, {}, None, "mesh.tp"),
        ({"cp": 2}, {}, None, "mesh.cp"),
        ({"ep": 2}, {}, 1.0, "grad_divisor"),
        ({"ep": 2}, {"bf16": True}, None, "mixed_precision"),
        ({"ep": 2}, {"auto_find_batch_size": True}, None, "auto_find_batch_size"),
        ({"ep": 2}, {"accelerator_config": {"even_batches": False}}, None, "accelerator_config.even_batches"),
        ({"ep": 2}, {"push_to_hub": True, "hub_strategy": "every_save"}, None, "hub_strategy"),
    ],
)
def test_what_sharding_does_otherwise_is_refused(
    tmp_path: Path, mesh: dict[str, int], changes: dict[str, Any], divisor: float | None, key: str
) -> None:
    assert run_ranks(refused, 2, str(tmp_path), mesh, changes, divisor)[0].startswith(f"{key}: expected")


def load_unfinished(folder: str) -> None:
    run(folder, True, {}, -1, True)


def test_a_checkpoint_that_was_not_finished_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2/fsdmoe").mkdir(parents=True)
    with pytest.raises(RankFailure, match=r"checkpoint-2 is not whole: expected trainer_state.json"):
        run_ranks(load_unfinished, 2, str(tmp_path))
