"""A training script as torch's documentation writes it for FSDP2; only the import of ``fully_shard`` differs.

``torchrun --nproc-per-node 2 examples/fsdp2_script.py checkpoints`` trains a tiny transformer on random
tokens and saves it; the same command again goes on from there. With the import changed back to
``torch.distributed.fsdp`` it is an FSDP2 script, and its checkpoints load here.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from fsdmoe.fsdp2 import MixedPrecisionPolicy, fully_shard

WIDTH, NUM_HEADS, NUM_LAYERS, VOCAB, SEQUENCE = 32, 4, 3, 64, 16
STEPS, MICRO_BATCHES = 6, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class AppState(Stateful):
    """Model and optimizer, for torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state, "step": self.step}

    def load_state_dict(self, state_dict: dict) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )  # fmt: skip
        self.step = state_dict["step"]


def batch_of(step: int, micro_batch: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + micro_batch)
    return torch.randint(0, VOCAB // 2, (2, SEQUENCE), generator=random).to(device)


def main(folder: str, steps: int = STEPS, param_dtype: torch.dtype | None = None) -> list[float]:
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if param_dtype is None:  # many CPUs have no products in bfloat16, and say so in every one
        param_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model: Any = Transformer().to(device)
    mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=mp_policy)
    fully_shard(model, mp_policy=mp_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    app = AppState(model, optimizer)
    if Path(folder).exists():
        dcp.load({"app": app}, checkpoint_id=folder)
    losses = []
    for step in range(app.step, app.step + steps):
        total = 0.0
        for index in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
            tokens = batch_of(step, index, device)
            logits = model(tokens).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    app.step += steps
    dcp.save({"app": app}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        print(f"steps {app.step - steps} to {app.step}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    dist.destroy_process_group()
