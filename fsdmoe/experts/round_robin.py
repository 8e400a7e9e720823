"""The fixed choice of benchmarks: every expert is loaded alike, whatever the router says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsdmoe.experts.router_spec import RouterSpec


def select_round_robin(num_tokens: int, spec: RouterSpec, device: torch.device) -> Tensor:
    """Ids ``[T, K]`` that load every expert alike (to within one choice, exactly when E divides T * K).

    Consecutive choices step through the experts by a stride without common divisor with E, about E over the
    golden ratio: the experts of a token differ, and lie on different devices as those of a real router would.
    """
    num_experts = spec.num_experts
    stride = max(1, round(num_experts * 0.618))
    while math.gcd(stride, num_experts) != 1:
        stride += 1
    choices = torch.arange(num_tokens * spec.top_k, device=device)
    return (choices % num_experts * stride % num_experts).view(num_tokens, spec.top_k)
