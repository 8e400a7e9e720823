"""Preferences in TRL's ``DPOTrainer``: ``torchrun --nproc-per-node 2 examples/dpo_trainer.py DIR 8``

Trains adapters on attention and experts of a tiny Qwen3-MoE to prefer answers that count on. The reference is
the same model with its adapters switched off. Run again with more steps, it goes on from its last checkpoint.
``pip install 'fsdmoe[trl]'``"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sft_trainer import CONFIG, build_tokenizer
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer

import fsdmoe


def build_pairs(count: int) -> Dataset:
    """Rows as TRL wants them: what to prefer to what."""

    def say(role: str, first: int, step: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(f"n{(first + step * place) % 100}" for place in range(3))}]

    return Dataset.from_list(
        [
            {
                "prompt": say("user", number, 1),
                "chosen": say("assistant", number + 3, 1),
                "rejected": say("assistant", number + 3, 7),
            }
            for number in range(count)
        ]
    )


def main(folder: str, steps: int) -> None:
    meshes = fsdmoe.build_meshes(ep=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)  # from_pretrained("tutorial/model") to fine-tune
    adapters = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = fsdmoe.parallelize(get_peft_model(model, adapters), meshes)
    arguments = DPOConfig(
        folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_steps=4,
        bf16=False,  # the model's own precision, which parallelize has set
        use_cpu=meshes.device.type == "cpu", report_to="none",
    )  # fmt: skip
    trainer = fsdmoe.prepare_trainer(  # the one call
        DPOTrainer(model, args=arguments, train_dataset=build_pairs(96), processing_class=build_tokenizer())
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model(f"{folder}/model")  # the adapter, as peft writes it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
