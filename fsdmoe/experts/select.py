"""Which experts a token is sent to: plain and group-limited top-k, and the fixed round-robin of benchmarks.

Legend: T tokens, E experts, K choices a token, G groups of experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsdmoe.experts.context import RouterSpec


def select_top_k(scores_TE: Tensor, spec: RouterSpec, correction_bias_E: Tensor | None = None) -> Tensor:
    """Ids ``[T, K]`` of the best experts, best first; the bias moves the choice only."""
    if correction_bias_E is not None:
        scores_TE = scores_TE + correction_bias_E
    if spec.num_groups > 1:
        scores_TE = _best_groups_only(scores_TE, spec)
    return scores_TE.topk(spec.top_k, dim=-1).indices


def _best_groups_only(scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Scores with every expert outside the token's best groups at minus infinity."""
    members_TGM = scores_TE.unflatten(1, (spec.num_groups, -1))
    if spec.group_score == "max":
        worth_TG = members_TGM.amax(-1)
    else:
        worth_TG = members_TGM.topk(2, dim=-1).values.sum(-1)
    outside_TG = torch.ones_like(worth_TG, dtype=torch.bool)
    outside_TG.scatter_(1, worth_TG.topk(spec.topk_groups, dim=-1).indices, False)
    return members_TGM.masked_fill(outside_TG.unsqueeze(-1), float("-inf")).flatten(1)


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
