"""Expert-choice routing: each expert picks the tokens that score highest for it, so loads are even by
construction.

Its scope is the tokens of this rank's micro-batch: which tokens stand together decides who is picked. A token
may be picked by any number of experts, none included. In a causal model the experts of a token then depend on
later tokens of the same micro-batch, which leaks future information into training and cannot be had in
generation.

Legend: T tokens, E experts, K columns of the result, C tokens that an expert picks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdmoe.experts.capacity import even_share
from fsdmoe.experts.config import ExpertChoiceConfig


def select_by_experts(
    scores_TE: Tensor, top_k: int, config: ExpertChoiceConfig, token_mask_T: Tensor | None = None
) -> Tensor:
    """Ids ``[T, K]`` of the experts that picked each token, highest score first, -1 in unused columns.

    K is the number of experts, or ``config.max_experts_per_token``. Nothing here waits for the device.
    """
    num_tokens, num_experts = scores_TE.shape
    if token_mask_T is not None:
        scores_TE = scores_TE.masked_fill(~token_mask_T.unsqueeze(1), float("-inf"))
        num_counted: int | Tensor = token_mask_T.sum()
    else:
        num_counted = num_tokens
    picks = min(num_tokens, int(even_share(num_tokens * top_k, num_experts, config.factor)))
    best_CE, tokens_CE = scores_TE.topk(picks, dim=0)
    limit = even_share(num_counted * top_k, num_experts, config.factor)
    within_C1 = torch.arange(picks, device=scores_TE.device).unsqueeze(1) < limit
    picked_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    picked_TE.scatter_(0, tokens_CE, within_C1 & (best_CE > float("-inf")))
    columns = min(config.max_experts_per_token or num_experts, num_experts)
    chosen_TK, ids_TK = scores_TE.masked_fill(~picked_TE, float("-inf")).topk(columns, dim=-1)
    return ids_TK.masked_fill(chosen_TK == float("-inf"), -1)
