"""A wrapped model in ``transformers.Trainer``: ``torchrun --nproc-per-node 2 examples/hf_trainer.py DIR 8``

Trains a tiny Qwen3-MoE to count; run again with more steps, it goes on from its last checkpoint. What it has
learnt is in DIR/model in the end, for ``from_pretrained``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fsdmoe

CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=128, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def main(folder: str, steps: int) -> None:
    meshes = fsdmoe.build_meshes(ep=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = fsdmoe.parallelize(model, meshes)  # load="tutorial/model" to fine-tune
    tokens = torch.arange(64 * 16).view(64, 16) % CONFIG.vocab_size
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_steps=4, eval_strategy="steps", eval_steps=4,
        max_grad_norm=1.0, load_best_model_at_end=True, metric_for_best_model="loss",
        use_cpu=meshes.device.type == "cpu", report_to="none",
    )  # fmt: skip
    trainer = fsdmoe.prepare_trainer(  # the one call
        Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:7],
            callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        )
    )  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model(f"{folder}/model")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
