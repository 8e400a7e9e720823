"""Root-mean-square norm of the last dimension: ``y = x / sqrt(mean(x²) + eps) · weight``, in fp32 inside.

The fused kernels keep x alone for backward and put the weight's gradient, summed in fp32, into its sink.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.kernels.backend import triton_for

_MAX_WIDTH = 16384  # a row is held in one program's registers


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Fused where it can be, else :func:`rms_norm_reference`."""
    fused = _fused_for(x, weight_D)
    if fused is not None:
        return fused.rms_norm_triton(x, weight_D, eps)
    return rms_norm_reference(x, weight_D, eps)


def _fused_for(x: Tensor, weight_D: Tensor) -> Any:
    fits = weight_D.dtype == x.dtype and weight_D.shape[0] <= _MAX_WIDTH
    return triton_for(x) if fits else None


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    return F.rms_norm(x, tuple(weight_D.shape), weight_D, eps)


class RMSNorm(torch.nn.Module):
    """``torch.nn.RMSNorm`` through :func:`rms_norm`: the same parameter, the same state dict."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
