"""Fine-tune a Hugging Face MoE: ``torchrun --nproc-per-node 8 examples/finetune.py FOLDER TEXT_FILE [EP]``"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fsdmoe

SEQUENCE, BATCH, STEPS = 512, 2, 100


def main(folder: str, text: str, ep: int = 1) -> None:
    meshes = fsdmoe.build_meshes(ep=ep)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = fsdmoe.parallelize(model.train(), meshes, load=folder)
    model.gradient_checkpointing_enable()
    optimizer = fsdmoe.AdamW(model, lr=1e-5)

    ids = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(), return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        first = (step * world + rank) * BATCH
        tokens = rows[torch.arange(first, first + BATCH) % len(rows)].to(meshes.device)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        fsdmoe.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    fsdmoe.checkpoint.save("finetuned", model, optimizer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
    dist.destroy_process_group()
