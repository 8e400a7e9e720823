"""Gated activations of the experts: ``h = φ(gate, up)``, with hand-written derivatives.

The pre-activation is ``z_M2N``, gates in the first N columns and ups in the last N. The derivatives are
written out because the experts' autograd function saves ``z`` alone and rebuilds the rest in backward.
Arithmetic is in the dtype of ``z``; callers pass fp32.

======== ============================================================================================
name     h
======== ============================================================================================
swiglu   ``silu(gate) * up``
geglu    ``gelu(gate) * up`` (exact, erf)
gpt_oss  ``g * sigmoid(1.702 g) * (u + 1)`` with ``g = min(gate, 7)`` and ``u = clamp(up, -7, 7)``
======== ============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.errors import refuse
from fsdmoe.rules import one_of

GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0


class GatedActivation(NamedTuple):
    """``forward(gate, up) -> h`` and ``backward(gate, up, dh) -> (dgate, dup)``."""

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def activate(z_M2N: Tensor, activation: str) -> Tensor:
    """``h_MN`` of a pre-activation."""
    return ACTIVATIONS[activation].forward(*z_M2N.chunk(2, dim=-1))


def activate_backward(z_M2N: Tensor, dh_MN: Tensor, activation: str) -> Tensor:
    """``dz_M2N`` from the gradient of ``h_MN``."""
    gate, up = z_M2N.chunk(2, dim=-1)
    return torch.cat(ACTIVATIONS[activation].backward(gate, up, dh_MN), dim=-1)


def activation_of(name: str) -> GatedActivation:
    refuse(one_of("experts", {"activation": name}, {"activation": tuple(ACTIVATIONS)}))
    return ACTIVATIONS[name]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return dh * up * (sigmoid + silu * (1 - sigmoid)), dh * silu


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _geglu_backward(gate: Tensor, up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * gate * gate) * (1 / math.sqrt(2 * math.pi))
    return dh * up * (cdf + gate * pdf), dh * gate * cdf


def _gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=GPT_OSS_LIMIT)
    up = up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return gate * torch.sigmoid(GPT_OSS_ALPHA * gate) * (up + 1)


def _gpt_oss_backward(gate: Tensor, up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    gate_passes, up_passes = gate <= GPT_OSS_LIMIT, up.abs() <= GPT_OSS_LIMIT
    gate, up = gate.clamp(max=GPT_OSS_LIMIT), up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    sigmoid = torch.sigmoid(GPT_OSS_ALPHA * gate)
    dgate = dh * (up + 1) * sigmoid * (1 + GPT_OSS_ALPHA * gate * (1 - sigmoid))
    return dgate * gate_passes, dh * gate * sigmoid * up_passes


ACTIVATIONS = {
    "swiglu": GatedActivation(_swiglu, _swiglu_backward),
    "geglu": GatedActivation(_geglu, _geglu_backward),
    "gpt_oss": GatedActivation(_gpt_oss, _gpt_oss_backward),
}
