"""Activations of the experts, ``h = φ(gate, up)`` or ``h = φ(z)``, with hand-written derivatives.

The pre-activation of gated experts is ``z_M2N``, gates in the first N columns and ups in the last N; without
gates it is ``z_MN``. The derivatives are written out because the experts' autograd function saves ``z`` alone
and rebuilds the rest in backward. Arithmetic is in the dtype of ``z``; callers pass fp32.

==================== =================================================================================
name                 h
==================== =================================================================================
swiglu               ``silu(gate) * up``
swiglu_clamped       ``silu(min(gate, L)) * clamp(up, -L, L)`` (DeepSeek-V4, GLM-5-Next, HY-V4)
swiglu_clamped_after ``min(silu(gate), L) * clamp(up, -L, L)`` (Step-3)
gpt_oss              ``g * sigmoid(1.702 g) * (u + 1)`` with ``g = min(gate, L)``, ``u = clamp(up, -L, L)``
geglu                ``gelu(gate) * up`` (exact, erf)
geglu_tanh           ``gelu(gate) * up`` (by tanh: Gemma-4)
relu2                ``relu(z)²``, without gates (Nemotron-H)
==================== =================================================================================

L is the limit that stands next to the name in :class:`~fsdmoe.kernels.expert_operands.ExpertPolicy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import one_of

GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0
GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715


class ExpertActivation(NamedTuple):
    """``forward(*parts, limit) -> h`` and ``backward(*parts, dh, limit) -> gradients of the parts``, which
    are gate and up, or z alone."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    is_gated: bool = True
    is_limited: bool = False
    """Whether it reads the limit."""


def activate(z: Tensor, activation: str, limit: float = GPT_OSS_LIMIT) -> Tensor:
    """``h_MN`` of a pre-activation."""
    how = ACTIVATIONS[activation]
    parts = z.chunk(2, dim=-1) if how.is_gated else (z,)
    return how.forward(*parts, limit)


def activate_backward(z: Tensor, dh_MN: Tensor, activation: str, limit: float = GPT_OSS_LIMIT) -> Tensor:
    """The gradient of the pre-activation from that of ``h_MN``."""
    how = ACTIVATIONS[activation]
    if not how.is_gated:
        return how.backward(z, dh_MN, limit)[0]
    return torch.cat(how.backward(*z.chunk(2, dim=-1), dh_MN, limit), dim=-1)


def activation_of(name: str) -> ExpertActivation:
    refuse(one_of("experts", {"activation": name}, {"activation": tuple(ACTIVATIONS)}))
    return ACTIVATIONS[name]


def _clamp_up(up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The up within its limits, and where a gradient passes."""
    return up.clamp(-limit, limit), up.abs() <= limit


def _swiglu(gate: Tensor, up: Tensor, limit: float = GPT_OSS_LIMIT) -> Tensor:
    return F.silu(gate) * up


def _swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)


def _swiglu_clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _swiglu_clamped_backward(gate: Tensor, up: Tensor, dh: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    up, up_passes = _clamp_up(up, limit)
    dgate, dup = _swiglu_backward(gate.clamp(max=limit), up, dh, limit)
    return dgate * (gate <= limit), dup * up_passes


def _swiglu_clamped_after(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _swiglu_clamped_after_backward(
    gate: Tensor, up: Tensor, dh: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    up, up_passes = _clamp_up(up, limit)
    silu = F.silu(gate)
    dgate, _ = _swiglu_backward(gate, up, dh, limit)
    return dgate * (silu <= limit), dh * silu.clamp(max=limit) * up_passes


def _gpt_oss(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(GPT_OSS_ALPHA * gate) * (up.clamp(-limit, limit) + 1)


def _gpt_oss_backward(gate: Tensor, up: Tensor, dh: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate_passes = gate <= limit
    gate = gate.clamp(max=limit)
    up, up_passes = _clamp_up(up, limit)
    sigmoid = torch.sigmoid(GPT_OSS_ALPHA * gate)
    dgate = dh * (up + 1) * sigmoid * (1 + GPT_OSS_ALPHA * gate * (1 - sigmoid))
    return dgate * gate_passes, dh * gate * sigmoid * up_passes


def _geglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.gelu(gate) * up


def _geglu_backward(gate: Tensor, up: Tensor, dh: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * gate * gate) * (1 / math.sqrt(2 * math.pi))
    return dh * up * (cdf + gate * pdf), dh * gate * cdf


def _geglu_tanh(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _geglu_tanh_backward(gate: Tensor, up: Tensor, dh: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    square = gate * gate
    # (1 + tanh(u)) / 2 is sigmoid(2 u).
    cdf = torch.sigmoid(2 * GELU_SCALE * gate * (1 + GELU_CUBE * square))
    pdf = cdf * (1 - cdf) * 2 * GELU_SCALE * (1 + 3 * GELU_CUBE * square)
    return dh * up * (cdf + gate * pdf), dh * gate * cdf


def _relu2(z: Tensor, limit: float) -> Tensor:
    return F.relu(z).square()


def _relu2_backward(z: Tensor, dh: Tensor, limit: float) -> tuple[Tensor, ...]:
    return (dh * 2 * F.relu(z),)


ACTIVATIONS = {
    "swiglu": ExpertActivation(_swiglu, _swiglu_backward),
    "geglu": ExpertActivation(_geglu, _geglu_backward),
    "geglu_tanh": ExpertActivation(_geglu_tanh, _geglu_tanh_backward),
    "gpt_oss": ExpertActivation(_gpt_oss, _gpt_oss_backward, is_limited=True),
    "swiglu_clamped": ExpertActivation(_swiglu_clamped, _swiglu_clamped_backward, is_limited=True),
    "swiglu_clamped_after": ExpertActivation(
        _swiglu_clamped_after, _swiglu_clamped_after_backward, is_limited=True
    ),
    "relu2": ExpertActivation(_relu2, _relu2_backward, is_gated=False),
}
