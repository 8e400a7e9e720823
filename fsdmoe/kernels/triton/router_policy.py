"""What a top-k router does with its logits, and the plain-torch meaning of it.

    scores   softmax or sigmoid of the logits, in fp32
    choice   scores (or logits: "topk_softmax") + bias, experts of groups that are not kept struck out
    weights  scores of the k best by choice, renormalised if asked, times scale
    sums     over the counted tokens of each segment: choices of each expert, probabilities, squared
             log-sum-exp

Probabilities are the scores, made to sum to one where they are sigmoids. The bias moves the choice only.
Legend: T tokens, E experts, K choices, S segments of T/S tokens each (sequences, say).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

# Keeps the renormalisation finite when every chosen score underflows; far below any score that matters.
EPSILON = 1e-20


@dataclass(frozen=True, kw_only=True)
class TopKPolicy:
    """How experts are chosen and weighted."""

    top_k: int
    score: Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk"
    normalise: bool = True
    """Divide the chosen scores by their sum; "topk_softmax" always does."""
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    """A group's score: its best choice, or the sum of its two best."""

    @property
    def renormalises(self) -> bool:
        return self.normalise or self.score == "topk_softmax"


class RouterTopK(NamedTuple):
    """Weights, ids and sums; the fields' shapes are [T, K], [T, K], [S, E], [S, E] and []."""

    weights: torch.Tensor
    """fp32, differentiable."""
    ids: torch.Tensor
    """int64; each token's experts, best first."""
    load: torch.Tensor
    """fp32: choices of each expert by the counted tokens of each segment."""
    prob_sum: torch.Tensor
    """fp32, differentiable: probabilities summed over the counted tokens of each segment."""
    z_sum: torch.Tensor
    """fp32, differentiable: the squared log-sum-exp of the logits, summed over the counted tokens."""


def _strike_groups(choice_TE: torch.Tensor, policy: TopKPolicy) -> torch.Tensor:
    grouped = choice_TE.view(choice_TE.shape[0], policy.num_groups, -1)
    best = grouped.topk(1 if policy.group_score == "max" else 2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(policy.topk_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(choice_TE)


def router_topk_reference(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    policy: TopKPolicy,
    *,
    num_segments: int = 1,
    token_mask_T: torch.Tensor | None = None,
) -> RouterTopK:
    """The same in plain torch, in the dtype of the logits (fp32 at least)."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = logits_TE.sigmoid() if policy.score == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = (logits_TE if policy.score == "topk_softmax" else scores_TE).detach()
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    if policy.num_groups > 1:
        choice_TE = _strike_groups(choice_TE, policy)
    ids_TK = choice_TE.topk(policy.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if policy.renormalises:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + EPSILON)
    counted_T1 = torch.ones_like(scores_TE[:, :1]) if token_mask_T is None else token_mask_T.unsqueeze(1)
    probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + EPSILON)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, ids_TK, 1.0)
    z_T1 = logits_TE.logsumexp(-1, keepdim=True).square()

    def segment_sums(values_TE: torch.Tensor) -> torch.Tensor:
        return (values_TE * counted_T1).view(num_segments, -1, logits_TE.shape[1]).sum(1)

    return RouterTopK(
        weights_TK * policy.scaling,
        ids_TK,
        segment_sums(chosen_TE),
        segment_sums(probs_TE),
        (z_T1 * counted_T1).sum(),
    )
