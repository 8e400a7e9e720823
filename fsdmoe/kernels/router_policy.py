"""What a top-k router does with its logits.

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
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

# Keeps the renormalisation finite when every chosen score underflows; far below any score that matters.
EPSILON = 1e-20

ScoreName = Literal["softmax_topk", "topk_softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class TopKPolicy:
    """How experts are chosen and weighted."""

    top_k: int
    score: ScoreName = "softmax_topk"
    """softmax over all experts, then choose; or choose, then softmax over the chosen; or a sigmoid an
    expert."""
    norm_topk: bool = False
    """Divide the chosen weights by their sum; "topk_softmax" always does."""
    scaling: float = 1.0
    """Factor on the weights, after renormalisation."""
    num_groups: int = 1
    """Groups of experts for group-limited routing; 1 is no groups."""
    topk_groups: int = 1
    """Groups that a token may choose from."""
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    """A group is worth its best expert (DeepSeek-V2) or its two best together (DeepSeek-V3)."""

    @property
    def renormalises(self) -> bool:
        return self.norm_topk or self.score == "topk_softmax"


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
    sums: torch.Tensor | None = None
    """The last three as they come from the kernel, ``[S, 2E + 1]``."""
