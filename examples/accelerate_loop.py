"""A loop with Accelerate: ``torchrun --nproc-per-node 2 examples/accelerate_loop.py DIR 8``

Trains a tiny Qwen3-MoE to count; run again with more steps, it goes on from its last checkpoint."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

import fsdmoe

CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=128, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def main(folder: str, steps: int) -> list[float]:
    meshes = fsdmoe.build_meshes(ep=2)
    accelerator = Accelerator(cpu=meshes.device.type == "cpu", gradient_accumulation_steps=2)
    fsdmoe.prepare_accelerator(accelerator)  # the one call
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = fsdmoe.parallelize(model, meshes)  # load="tutorial/model" to fine-tune
    optimizer = fsdmoe.AdamW(model, lr=1e-2)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    rows = (torch.arange(63 * 16) % CONFIG.vocab_size).view(63, 16)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(rows, batch_size=2)
    )
    done = Path(folder, "step.txt")
    step = int(done.read_text()) if done.exists() else 0
    if step:
        accelerator.load_state(f"{folder}/state-{step}")
    losses = []
    batches = accelerator.skip_first_batches(loader, 2 * step)
    for tokens in batches:
        with accelerator.accumulate(model):
            loss = model(tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()[None]).mean().item())
        step += accelerator.sync_gradients
        if step == steps:
            break
    accelerator.save_state(f"{folder}/state-{step}")
    if accelerator.is_main_process:
        done.write_text(str(step))  # last: what it names is whole
    accelerator.print(f"loss {losses[-1]:.4f} after step {step}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
