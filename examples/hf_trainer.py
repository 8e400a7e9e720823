"""A wrapped model in ``transformers.Trainer``: ``torchrun --nproc-per-node 2 examples/hf_trainer.py DIR 8``

Trains a tiny Qwen3-MoE to count; run again with more steps, it goes on from its last checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import get_last_checkpoint

import fsdmoe

CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=128, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


class Arguments(TrainingArguments):
    place_model_on_device = False  # the shards are where they belong


class ShardedTrainer(Trainer):
    """Model and optimizer are ready: accelerate must not wrap them. All ranks clip, save and load."""

    model: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, **_: model
        accelerator.prepare_optimizer = lambda optimizer, **_: optimizer
        accelerator.no_sync = lambda model: fsdmoe.engine_of(model).micro_batch(last=False)
        accelerator.clip_grad_norm_ = lambda _, max_norm: fsdmoe.clip_grad_norm(self.model, max_norm).total

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = f"{output_dir or self.args.output_dir}/fsdmoe"
        fsdmoe.checkpoint.save(folder, self.model, self.optimizer, schedule=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = f"{resume_from_checkpoint}/fsdmoe"
        fsdmoe.checkpoint.load(folder, self.model, self.optimizer, schedule=self.lr_scheduler)


def main(folder: str, steps: int) -> None:
    meshes = fsdmoe.build_meshes(ep=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = fsdmoe.parallelize(model, meshes)  # load="path/to/hf_dir" to fine-tune
    optimizer = fsdmoe.AdamW(model, lr=1e-2)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    tokens = torch.arange(64 * 16).view(64, 16) % CONFIG.vocab_size
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = Arguments(
        folder, max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, save_steps=4, save_only_model=True, eval_strategy="steps", eval_steps=4,
        max_grad_norm=1.0, use_cpu=meshes.device.type == "cpu", report_to="none",
    )  # fmt: skip
    trainer = ShardedTrainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:8], optimizers=(optimizer, schedule)
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
