"""Balance terms: what each counts, over which tokens, and how the shares of all ranks add up to one loss.

Every auxiliary term is ``E * sum_e f_e * P_e`` over a scope of tokens: ``f_e`` the fraction of the scope's
choices that fell on expert e (no gradient), ``P_e`` the mean probability of e (gradient). It is 1 when even.
A scope weighs its tokens over all tokens of the step, N, and P is linear in the tokens, so a rank's share
needs only its own probabilities and the scope's counts::

    share = 1/N * sum over scopes, sum_e  E * f_e(scope) * sum over own tokens of the scope, p_te

Shares of all ranks and micro-batches simply add up, and so do their gradients. Only counts are ever reduced.

============  ============================================  ===================  ====================
term          scope of f                                    counts reduced over  one process == any
============  ============================================  ===================  ====================
sequence      each sequence                                 cp x tp              yes
micro_batch   a micro-batch of a data-parallel rank         cp x tp              over cp and tp only
global_batch  all ranks, the step's micro-batches so far    all ranks            with one micro-batch
device        device_scope's; an EP rank's experts as one   as the scope's       as the scope's
transformers  a micro-batch, all layers as one              cp x tp              over cp and tp only
z_loss        each token: (log sum_e exp logit_e)^2         nothing              yes
============  ============================================  ===================  ====================

Legend: S sequences, E experts, V devices (EP ranks), L layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.config import BalanceConfig, Scope
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.scores import ScoreRule, score_choices


def count_choices(
    ids_TK: Tensor, num_experts: int, *, num_sequences: int = 1, context: RoutingContext | None = None
) -> Tensor:
    """Loads ``[S, E]`` of this rank's counted tokens, fp32, by sequence or in one row; ids of -1 count
    nowhere."""
    bins_TK, counted_TK = ids_TK.clamp_min(0), ids_TK >= 0
    if context is not None:
        if num_sequences > 1 and context.sequence_ids_T is not None:
            bins_TK = bins_TK + num_experts * context.sequence_ids_T.unsqueeze(1)
        if context.token_mask_T is not None:
            counted_TK = counted_TK & context.token_mask_T.bool().unsqueeze(1)
    load = torch.zeros(num_sequences * num_experts, dtype=torch.float32, device=ids_TK.device)
    load.scatter_add_(0, bins_TK.flatten(), counted_TK.flatten().float())
    return load.view(num_sequences, num_experts)


def balance_loss(
    load_SE: Tensor, prob_sum_SE: Tensor, z_sum: Tensor, config: BalanceConfig, context: RoutingContext
) -> Tensor:
    """This rank's share of one layer's terms, all but ``transformers``, which needs every layer."""
    loss = prob_sum_SE.new_zeros(())
    if not (config.uses_probabilities or config.z_loss):
        return loss
    reduced: dict[str, Tensor] = {}
    for scope, coefficient, group_size in _terms(config, context, load_SE.shape[1]):
        counts_SE = _scope_counts(load_SE, scope, context, reduced)
        probs_SE = prob_sum_SE if scope == "sequence" else prob_sum_SE.sum(0, keepdim=True)
        loss = loss + coefficient * _products(counts_SE, probs_SE, group_size)
    if config.z_loss:
        loss = loss + config.z_loss * z_sum
    return loss / _num_global_tokens(context, load_SE)


def _terms(
    config: BalanceConfig, context: RoutingContext, num_experts: int
) -> list[tuple[Scope, float, int | None]]:
    """Active terms as (scope, coefficient, experts that count as one; None leaves experts single)."""
    terms: list[tuple[Scope, float, int | None]] = [
        ("sequence", config.sequence, None),
        ("micro_batch", config.micro_batch, None),
        ("global_batch", config.global_batch, None),
    ]
    if config.device:
        terms.append((config.device_scope, config.device, context.experts_per_device(num_experts)))
    return [term for term in terms if term[1]]


def _scope_counts(
    load_SE: Tensor, scope: Scope, context: RoutingContext, reduced: dict[str, Tensor]
) -> Tensor:
    """The scope's loads, ``[S, E]`` or ``[1, E]``; each collective runs once however many terms read it."""
    if scope == "global_batch":
        if "global" not in reduced:
            load_E = load_SE.sum(0, keepdim=True)
            if context.prior_load_LE is not None:
                load_E = load_E + context.prior_load_LE[context.layer]
            reduced["global"] = _all_sum(load_E, context.global_group)
        return reduced["global"]
    if "sequence" not in reduced:
        reduced["sequence"] = _all_sum(load_SE, context.sequence_group)
    return reduced["sequence"] if scope == "sequence" else reduced["sequence"].sum(0, keepdim=True)


def _products(counts_SE: Tensor, prob_sum_SE: Tensor, group_size: int | None) -> Tensor:
    """``sum E * f * sum p`` over all rows; with groups, the experts of each counted as one."""
    if group_size is not None:
        counts_SE = counts_SE.unflatten(1, (-1, group_size)).sum(-1)
        prob_sum_SE = prob_sum_SE.unflatten(1, (-1, group_size)).sum(-1)
    fraction_SE = counts_SE / counts_SE.sum(-1, keepdim=True).clamp_min(1.0)
    return counts_SE.shape[1] * (fraction_SE * prob_sum_SE).sum()


def joint_balance_loss(
    load_LE: Tensor,
    prob_sum_LE: Tensor,
    *,
    top_k: int,
    num_global_tokens: int | float | Tensor | None = None,
    sequence_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """transformers' ``load_balancing_loss_func`` from every layer's loads and summed probabilities.

    It takes all layers as one (a product of means over layers, which is not the mean of the layers' products)
    and counts top_k choices a token, so that even routing gives top_k. Without ``num_global_tokens`` it
    equals transformers' value on these tokens; with it, this rank's share of the step's."""
    counts_E = _all_sum(load_LE.sum(0), sequence_group)
    fraction_E = top_k * counts_E / counts_E.sum().clamp_min(1.0)
    if num_global_tokens is None:
        num_global_tokens = load_LE.sum() / (top_k * load_LE.shape[0])
    num_tokens = torch.as_tensor(num_global_tokens, dtype=torch.float32, device=load_LE.device).clamp_min(1.0)
    return load_LE.shape[1] * (fraction_E * prob_sum_LE.mean(0)).sum() / num_tokens


def statistics_of_logits(
    logits_TE: Tensor, top_k: int, token_mask_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``load_E`` and differentiable ``prob_sum_E`` of another library's router, as transformers counts
    them."""
    logits_TE = logits_TE.float()
    context = RoutingContext(token_mask_T=token_mask_T)
    probs_TE = logits_TE.detach().softmax(-1)
    ids_TK = probs_TE.topk(top_k, dim=-1).indices
    rule = ScoreRule("softmax_topk", normalise=False, scaling=1.0, want_sums=True)
    scored = score_choices(logits_TE, ids_TK, rule, scores_TE=probs_TE, token_mask_T=token_mask_T)
    return count_choices(ids_TK, logits_TE.shape[1], context=context)[0], scored.prob_sum_SE[0]


def _num_global_tokens(context: RoutingContext, load_SE: Tensor) -> Tensor | float:
    """The divisor of every term; never below one, so that a step without tokens has a loss of zero."""
    number = context.num_global_tokens
    if isinstance(number, Tensor):
        return number.to(device=load_SE.device, dtype=torch.float32).clamp_min(1.0)
    if number is None:
        raise AssertionError("expected the router to fill in num_global_tokens")
    return max(1.0, float(number))


def _all_sum(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or group.size() == 1:
        return counts
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    return counts
