"""Muon in plain torch, a matrix at a time, written from the papers (Jordan et al. 2024; Liu et al. 2025,
"Muon is scalable for LLM training"): for one process, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

Split = Callable[[str, torch.Tensor], list[torch.Tensor]]
"""The matrices of a parameter, as views of it."""


def orthogonalize(g: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """``U Vᵀ`` of the singular value decomposition ``U S Vᵀ``, roughly."""
    a, b, c = coefficients
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class ReferenceMuon:
    """Momentum, look-ahead, orthogonalise, scale, decay; other parameters by ``torch.optim.AdamW``."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        split: Split,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        scale: str = "match_rms_adamw",
    ) -> None:
        self.lr, self.weight_decay, self.scale, self.split = lr, weight_decay, scale, split
        self.coefficients = (3.4445, -4.7750, 2.0315)
        named = list(named)
        self.matrices = {name: p for name, p in named if split(name, p)}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        rest = [(name, p) for name, p in named if name not in self.matrices]
        groups = [
            {"params": [p for _, p in rest if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for _, p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for name, parameter in self.matrices.items():
            if parameter.grad is None:
                continue
            momentum = self.momentum[name]
            momentum.mul_(0.95).add_(parameter.grad, alpha=0.05)
            ahead = 0.05 * parameter.grad + 0.95 * momentum
            parameter.mul_(1 - self.lr * self.weight_decay)
            for weight, update in zip(self.split(name, parameter), self.split(name, ahead), strict=True):
                rows, columns = weight.shape
                size = 0.2 * math.sqrt(max(rows, columns))
                if self.scale == "original":
                    size = math.sqrt(max(1, rows / columns))
                weight.add_(orthogonalize(update, self.coefficients, 5), alpha=-self.lr * size)
