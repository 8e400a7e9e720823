"""The numbers of one AdamW update, for every kernel and reference that makes one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """``step`` counts from 1; all tensors are fp32 scalars on the device."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: torch.Tensor
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
