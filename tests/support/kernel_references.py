"""What kernels compute, in plain torch: references that no run takes, for tests and benchmarks.

Each is the function of the same name in :mod:`fsdmoe.kernels.triton`. References that are also the fallback
where a kernel cannot run stand in the package.
"""

from __future__ import annotations

import torch

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.router_policy import EPSILON, RouterTopK, TopKPolicy


def adamw_reference_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamWStep,
    *,
    weight: torch.Tensor | None = None,
) -> None:
    """In the precision of ``main``; looks at the flag from the host."""
    if numbers.found_inf is not None and numbers.found_inf > 0:
        return
    grad = grad.to(main.dtype)
    first = exp_avg.to(main.dtype).lerp(grad, 1 - numbers.beta1)
    second = exp_avg_sq.to(main.dtype) * numbers.beta2 + (1 - numbers.beta2) * grad * grad
    step = numbers.step.double()
    correction1, correction2 = 1 - numbers.beta1**step, 1 - numbers.beta2**step
    main.mul_(1 - numbers.lr * numbers.weight_decay)
    main.sub_(numbers.lr * first / correction1 / ((second / correction2).sqrt() + numbers.eps))
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if weight is not None:
        weight.copy_(main)


def cross_entropy_reference_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    mask_C: torch.Tensor,
    divisor: torch.Tensor,
    *,
    with_grad: bool = True,
) -> torch.Tensor:
    outside_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
    labels_C1 = labels_C.masked_fill(outside_C, 0)[:, None]
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    lse_C = wide_CV.logsumexp(-1)
    picked_C = wide_CV.gather(1, labels_C1).squeeze(1).masked_fill(outside_C, torch.nan)
    losses_C = torch.where(mask_C, lse_C - picked_C, 0.0)
    if with_grad:
        onehot_CV = torch.zeros_like(wide_CV).scatter_(1, labels_C1, 1.0)
        grad_CV = ((wide_CV - lse_C[:, None]).exp() - onehot_CV) / divisor
        logits_CV.copy_(grad_CV * (mask_C & ~outside_C)[:, None])
    return losses_C


def rope_reference(
    x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """In the wider of fp32 and the type of x."""
    wide = x_BSHD.to(torch.promote_types(x_BSHD.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if cos.shape[-1] == first.shape[-1]:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    (cos_first, cos_second), (sin_first, sin_second) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    rotated = (first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    return torch.cat(rotated, dim=-1).to(x_BSHD.dtype)


def router_input_grad_reference(
    dlogits_TE: torch.Tensor, weight_ED: torch.Tensor, passed_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    high_TE = dlogits_TE.to(weight_ED.dtype)
    halves_T2E = torch.cat((high_TE, (dlogits_TE - high_TE).to(weight_ED.dtype)), dim=1)
    dx_TD = halves_T2E.float() @ torch.cat((weight_ED, weight_ED)).float()
    return (dx_TD if passed_TD is None else dx_TD + passed_TD).to(weight_ED.dtype), halves_T2E


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
    """In the dtype of the logits (fp32 at least)."""
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
