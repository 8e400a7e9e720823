"""What the contenders of ``train_step.py`` share: the problem, and AdamW as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdmoe.models.config import ModelConfig

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY, STD, SEED = 0.1, 0.02, 0


@dataclass(frozen=True)
class Problem:
    """What is trained, on what, in which dtype."""

    config: ModelConfig
    batch: int
    length: int
    dtype: str
    device: torch.device
    backend: str
    """Of torch.compile."""
    graphs: bool = False
    """fsdmoe's contenders replay forward and backward as a CUDA graph: train.graphs = "step"."""
    world: int = 0
    """fsdmoe's contenders are one rank of an emulated world of so many (``fsdp_world``); 0: a real one."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Tokens and labels in, the mean loss out; weights have been updated."""


def _torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True, **SETTINGS)


def plain_step(model: nn.Module, loss_of: Step) -> Step:
    optimizer = _torch_adamw(model)

    def step(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        loss = loss_of(tokens_BS, labels_BS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
