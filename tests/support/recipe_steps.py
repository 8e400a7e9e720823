"""Three steps of a small model by a recipe: losses, and the gradients of the first step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model, preset_config
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision import PrecisionConfig

NUM_STEPS = 3
SHAPE = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip


class Steps(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]


def three_steps(precision: PrecisionConfig) -> Steps:
    """On this rank's device; two micro-batches a step, the same for any recipe."""
    config = preset_config("tiny-qwen3", **SHAPE)
    meshes = build_meshes()
    model = parallelize(
        build_model(config), meshes, ParallelPolicy(precision=precision, seed=0, grad_divisor=1.0)
    )
    optimizer = AdamW(model, lr=1e-3)
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab_size, (2, 2, 129), generator=random).to(meshes.device)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        losses.append(0.0)
        for number, rows in enumerate(tokens):
            with engine_of(model).micro_batch(last=number == 1):
                loss = model(rows[:, :-1], labels_BS=rows[:, 1:]).loss / 2
                loss.backward()
            losses[-1] += loss.item()
        if step == 0:
            gradients = {
                name: parameter.grad.full_tensor().detach().clone()
                for name, parameter in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    return Steps(losses, gradients)


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, by the norm of what is right."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()
