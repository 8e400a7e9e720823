"""Short runs of TRL's trainers, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdmoe
from tests.support.hf_tiny import tiny_hf
from tests.support.trainer_case import arguments, forget_accelerate, kill_at, logged

VOCABULARY = 128
"""That of ``examples.sft_trainer.build_tokenizer``, rounded up."""
Found = dict[str, list[float]]
KEYS = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "reward", "margin", "completions/mean_length")


def words(start: int, count: int) -> str:
    return " ".join(f"n{(start + step) % 100}" for step in range(count))


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": words(7 * row, 2 + row % 3) + " ",
            "chosen": words(11 * row, 1 + row % 4),
            "rejected": words(5 * row + 3, 2 + row % 2),
        }
        for row in range(count)
    ]


def judged(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["rejected" if n % 3 else "chosen"], "label": n % 3 == 0}
        for n, row in enumerate(pairs(count))
    ]


def write_completions(file: Path) -> None:
    """What a sampler said earlier, by prompt: each prompt's completions in turn."""
    said = {}
    for number, row in enumerate(pairs(24)):
        said[row["prompt"]] = [words(number + 3 * turn, 1 + (number + turn) % 4) for turn in range(4)]
    file.write_text(json.dumps(said))


def replayed(file: str) -> Any:
    """A ``rollout_func`` of GRPOTrainer that reads completions instead of sampling them."""
    said = json.loads(Path(file).read_text())

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        first = trainer.state.global_step  # a resumed run goes on in the same place
        answers = []
        for place, prompt in enumerate(prompts):
            turn = first + prompts[:place].count(prompt)
            answers.append(said[prompt][turn % len(said[prompt])] + " <end>")
        return {
            "prompt_ids": tokenizer(prompts)["input_ids"],
            "completion_ids": tokenizer(answers)["input_ids"],
            "logprobs": None,
        }

    return roll_out


class Reward:
    """A share of even numbers; keeps what was said, by prompt."""

    __name__ = "even"

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {}

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        for prompt, completion in zip(prompts, completions, strict=True):
            self.said.setdefault(prompt, []).append(completion)
        return [
            sum(int(word[1:]) % 2 == 0 for word in said.split() if word[0] == "n") / 4 for said in completions
        ]


def build_model(ep: int, adapters: str = "", labels: int = 0, folder: str = "") -> nn.Module:
    """A tiny model, sharded where ``ep`` is not 0; ``adapters`` on attention and experts, "fresh" or "made"
    (that change the model already; ``ref`` next to them) or "alone" (the same without)."""
    torch.manual_seed(1)
    model: Any = tiny_hf("qwen3_moe", vocab_size=VOCABULARY, output_router_logits=False)
    if labels:
        from transformers import AutoModelForSequenceClassification

        model.config.update({"num_labels": labels, "pad_token_id": 0})
        model = AutoModelForSequenceClassification.from_config(model.config)
    if folder:
        model.config._name_or_path = folder
    if adapters:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj"],
            init_lora_weights=adapters == "fresh", task_type="SEQ_CLS" if labels else "CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, config)
        if adapters == "made" and ep:
            model.add_adapter("ref", config)
    return fsdmoe.parallelize(model, fsdmoe.build_meshes(ep=ep)) if ep else model


def build_trainer(kind: str, folder: str, ep: int, given: dict[str, Any]) -> Any:
    """A trainer as TRL makes it, see :func:`run_trl`."""
    import trl
    from datasets import Dataset

    from examples.sft_trainer import build_tokenizer

    forget_accelerate()
    given = {"max_steps": 3, "bf16": False} | given
    adapters = given.pop("adapters", "")
    reference = given.pop("reference", "")
    replay = given.pop("replay", "")
    kill = given.pop("kill", -1)
    more: dict[str, Any] = {}
    rows = pairs(24)
    if kind != "Reward":
        given["router_aux_loss_coef"] = 0.0  # that of half a batch is another
    if kind == "KTO":
        given["train_sampling_strategy"] = "sequential"
        rows = judged(24)
    if kind == "GRPO":
        given |= {"num_generations": 2, "max_completion_length": 6}
        rows = [{"prompt": row["prompt"]} for row in rows]
        more["reward_funcs"] = Reward()
        if replay:
            more["rollout_func"] = replayed(replay)
    model = build_model(ep, adapters, labels=int(kind == "Reward"), folder=folder)
    if reference:
        more["ref_model"] = build_model(ep if reference == "sharded" else 0)
    return getattr(trl, f"{kind}Trainer")(
        model, args=arguments(folder, getattr(trl, f"{kind}Config"), **given), callbacks=[kill_at(kill)],
        train_dataset=Dataset.from_list(rows), processing_class=build_tokenizer(), **more,
    )  # fmt: skip


def run_trl(kind: str, folder: str, ep: int, given: dict[str, Any], resume: bool = False) -> Found:
    """What a trainer logged; ``ep`` 0: not sharded. ``given`` holds arguments of the trainer, and ours:
    ``adapters``, ``reference`` ("sharded" or "whole", a model of its own), ``replay`` (a file), ``kill``."""
    trainer = build_trainer(kind, folder, ep, given)
    if ep:
        fsdmoe.prepare_trainer(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return {key: found for key in KEYS if (found := logged(trainer, key))}
