"""``router_topk_triton``: scores, choice, weights and balance sums of a top-k router in one kernel.

A program holds the scores of a few tokens in registers from logits to weights. Backward recomputes them from
the logits. Sums are taken per program and then over programs, in a fixed order. ``router_policy`` says what
everything means, in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.router_policy import RouterTopK, TopKPolicy
from fsdmoe.kernels.triton.router_kernels import route, route_backward

_MAX_EXPERTS = 1024


def supports_router(num_experts: int, policy: TopKPolicy) -> bool:
    """Groups are cut by reshaping in registers: with groups, both their number and size are powers of two."""
    if not policy.top_k <= num_experts <= _MAX_EXPERTS:
        return False
    is_power_of_two = num_experts & (num_experts - 1) == 0
    return policy.num_groups == 1 or (is_power_of_two and num_experts % policy.num_groups == 0)


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        token_mask_T: torch.Tensor | None,
        policy: TopKPolicy,
        num_segments: int,
    ) -> tuple[torch.Tensor, ...]:
        weights_TK, ids_TK, sums = route(logits_TE, bias_E, token_mask_T, policy, num_segments)
        ctx.save_for_backward(logits_TE, ids_TK, token_mask_T)
        ctx.policy = policy
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return weights_TK, ids_TK, sums

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dweights_TK: torch.Tensor | None, _: None, dsums: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits_TE, ids_TK, token_mask_T = ctx.saved_tensors
        dlogits_TE = route_backward(logits_TE, ids_TK, token_mask_T, dweights_TK, dsums, ctx.policy)
        return dlogits_TE, None, None, None, None


def router_topk_triton(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    policy: TopKPolicy,
    *,
    num_segments: int = 1,
    token_mask_T: torch.Tensor | None = None,
) -> RouterTopK:
    """Route every token; differentiable in the logits, through weights, probability sums and z sum.

    ``token_mask_T`` (bool or 0/1) says which tokens the sums count; all are routed.
    """
    num_tokens, num_experts = logits_TE.shape
    if num_tokens % num_segments:
        raise ValueError(f"expected tokens in {num_segments} equal segments, got {num_tokens} tokens")
    if token_mask_T is not None:
        token_mask_T = token_mask_T.contiguous()
    weights_TK, ids_TK, sums = _Router.apply(
        logits_TE.contiguous(), bias_E, token_mask_T, policy, num_segments
    )
    load_SE, prob_sum_SE, z_S = sums.split((num_experts, num_experts, 1), dim=1)
    z_sum = z_S.view(()) if num_segments == 1 else z_S.sum()
    return RouterTopK(weights_TK, ids_TK, load_SE.detach(), prob_sum_SE, z_sum, sums)
