"""Rewards in TRL's ``GRPOTrainer``: ``torchrun --nproc-per-node 2 examples/grpo_trainer.py DIR 8``

A tiny Qwen3-MoE answers prompts, generating over ``ep``, and is rewarded for even numbers. Run again with
more steps, it goes on from its last checkpoint. ``pip install 'fsdmoe[trl]'``"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from sft_trainer import CONFIG, build_tokenizer
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import fsdmoe


def reward_even(completions: list[str], **columns: Any) -> list[float | None]:
    """The share of words that are even numbers."""

    def share(words: list[str]) -> float:
        return sum(word[0] == "n" and int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))

    return [share(completion.split()) for completion in completions]


def main(folder: str, steps: int) -> None:
    meshes = fsdmoe.build_meshes(ep=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = fsdmoe.parallelize(model, meshes)  # load="tutorial/model" to fine-tune
    arguments = GRPOConfig(
        folder, max_steps=steps, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        learning_rate=1e-3, logging_steps=1, save_steps=4,
        bf16=False,  # the model's own precision, which parallelize has set
        use_cpu=meshes.device.type == "cpu", report_to="none",
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": f"user n{number} n{number + 1} "} for number in range(64)])
    trainer = fsdmoe.prepare_trainer(  # the one call
        GRPOTrainer(model, reward_even, arguments, train_dataset=prompts, processing_class=build_tokenizer())
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model(f"{folder}/model")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
