"""Root-mean-square norm of the last dimension: ``y = x / sqrt(mean(x²) + eps) · weight``, in fp32 inside.

Wrapped models have two more forms of it: a weight that is an offset from one (``offset``), and a gate that
the normed rows are multiplied with (:func:`gated_norm`). The fused kernels keep their inputs alone for
backward and put the weight's gradient, summed in fp32, into its sink.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.kernels.backend import triton_for

_MAX_WIDTH = 16384  # a row is held in one program's registers


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Fused where it can be, else :func:`rms_norm_reference`."""
    fused = _fused_for(x, weight_D)
    if fused is not None:
        return fused.rms_norm_triton(x, weight_D, eps, offset)
    return rms_norm_reference(x, weight_D, eps, offset)


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The same in plain torch."""
    if offset == 0.0:
        return F.rms_norm(x, tuple(weight_D.shape), weight_D, eps)
    weight_D = offset + _widened(weight_D)
    return F.rms_norm(_widened(x), tuple(weight_D.shape), weight_D, eps).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, *, silu: bool) -> Tensor:
    """The norm times ``silu(gate)``, or times ``sigmoid(gate)``."""
    fused = _fused_for(x, weight_D) if (gate.dtype, gate.shape) == (x.dtype, x.shape) else None
    if fused is not None:
        return fused.gated_norm_triton(x, gate, weight_D, eps, silu=silu)
    return gated_norm_reference(x, gate, weight_D, eps, silu=silu)


def gated_norm_reference(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, *, silu: bool) -> Tensor:
    """The same in plain torch."""
    opened = F.silu(_widened(gate)) if silu else torch.sigmoid(_widened(gate))
    normed = F.rms_norm(_widened(x), tuple(weight_D.shape), _widened(weight_D), eps)
    return (normed * opened).to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fused_for(x: Tensor, weight_D: Tensor) -> Any:
    fits = weight_D.dtype == x.dtype and x.shape[-1:] == weight_D.shape and weight_D.shape[0] <= _MAX_WIDTH
    return triton_for(x) if fits else None


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
