"""Tiny models with adapters by peft: one process without fsdmoe, and the same steps on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from tests.support.hf_tiny import VOCABULARY, tiny_hf

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROWS = 4
"""Of a step, over all ranks that read different data."""
Steps = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Losses, the first step's gradients, the adapters afterwards."""


def adapted(family: str, kind: str = "lora", **settings: Any) -> Any:
    """A ``PeftModel`` whose adapters change what it computes: LoRA on attention and experts, or DoRA on
    attention."""
    import peft

    from fsdmoe.huggingface.peft_api import attention_projections

    model = tiny_hf(family, output_router_logits=False)
    parameters = list(EXPERTS) if kind == "lora" else None
    chosen: dict[str, Any] = {
        "r": 3, "lora_alpha": 6, "use_dora": kind == "dora", "task_type": "CAUSAL_LM",
        "target_modules": list(attention_projections(model)), "target_parameters": parameters,
    }  # fmt: skip
    torch.manual_seed(0)  # peft draws A
    shell = peft.get_peft_model(model, peft.LoraConfig(**chosen | settings))
    move(shell, 3)
    return shell.train()


def move(model: nn.Module, seed: int) -> None:
    """Add something random to every adapter; B alone would be zero."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=random))


def rows(step: int, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of one of the ``parts`` that read different data."""
    random = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS, 8), generator=random)
    return tokens.chunk(parts)[part], labels.chunk(parts)[part]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.05)
    if hasattr(model, "_fsdmoe_engine"):
        return AdamW(model, lr=1e-2, weight_decay=0.0)
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)


def alone(
    family: str,
    kind: str,
    optimizer: str,
    steps: int,
    change: Callable[[nn.Module], None] = lambda model: None,
) -> Steps:
    """peft in one process, of a model that ``change`` may change."""
    model = adapted(family, kind)
    change(model)
    stepper = make_optimizer(optimizer, model)
    losses, gradients = [], {}
    for step in range(steps):
        tokens, labels = rows(step, 0, 1)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        stepper.zero_grad()
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def wrapped(
    family: str,
    kind: str,
    optimizer: str,
    steps: int,
    mesh: dict[str, int],
    policy: ParallelPolicy | None = None,
) -> Steps:
    """The same on this rank of a mesh."""
    meshes = build_meshes(**mesh)
    model = parallelize(adapted(family, kind), meshes, policy)
    return train_steps(model, meshes, optimizer, steps)


def train_steps(model: nn.Module, meshes: Meshes, optimizer: str, steps: int) -> Steps:
    stepper, decoder = make_optimizer(optimizer, model), as_causal_lm(model)
    losses, gradients = [], {}
    for step in range(steps):
        tokens, labels = rows(step, meshes.rank(Axis.BATCH), meshes.size(Axis.BATCH))
        out = decoder(tokens, labels_BS=labels, loss_mask_BS=torch.ones_like(labels, dtype=torch.bool))
        out.loss.backward()
        loss = out.cross_entropy.clone()
        torch.distributed.all_reduce(loss, group=meshes.group(Axis.LOSS))
        losses.append(loss.item() / meshes.size(Axis.LOSS))
        if step == 0:
            gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        stepper.zero_grad()
    whole = {n: p.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    return losses, gradients, whole


def differences(expected: Steps, got: Steps) -> dict[str, float]:
    """The largest relative difference of losses, gradients and adapters; infinite where names differ."""

    def largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
        if ours.keys() != theirs.keys():
            return float("inf")
        return max(
            float((ours[n] - t).abs().max() / t.abs().max().clamp(min=1e-3)) for n, t in theirs.items()
        )

    losses = max(abs(a - b) / abs(b) for a, b in zip(got[0], expected[0], strict=True))
    return {
        "losses": losses,
        "gradients": largest(got[1], expected[1]),
        "adapters": largest(got[2], expected[2]),
    }
