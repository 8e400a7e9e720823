"""Logits in fp32 and everything differentiable that follows from them, keeping one fp32 ``[T, E]`` in all.

Two autograd functions make up the router's differentiable part::

    x_TD, weight_ED --_Logits--> logits_TE --_Scores--> weights_TK, prob_sum_SE, z_sum
          saves x and weight themselves      saves logits_TE (4·T·E bytes) and indices
                             --> x_TD      for what follows: both gradients of x are added in one product

Plain autograd would keep an fp32 copy of x, the softmax, its gathered and normalised forms, and an ``[T, E]``
more for every balance term; here backward recomputes them from the logits. Balance terms see the scores only
through sums over sequences (``prob_sum_SE``) and the z-loss through one number, so no term costs memory.

Legend: T tokens, D hidden width, E experts, K choices a token, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.grad_sink import deliver, sink_of
from fsdmoe.kernels.router_policy import ScoreName

_CHUNK_BYTES = 32 << 20  # bound of the transient fp32 copies of x


@dataclass(frozen=True)
class ScoreRule:
    """How logits become weights and which sums are wanted."""

    score: ScoreName
    normalise: bool
    scaling: float
    num_sequences: int = 1
    want_sums: bool = False
    want_z: bool = False
    complete: bool = False
    """Every id names an expert: spares the handling of -1."""


class Scored(NamedTuple):
    weights_TK: Tensor
    prob_sum_SE: Tensor
    z_sum: Tensor


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, accumulated and returned in fp32 (in fp64 for fp64 inputs)."""
    return _Logits.apply(x_TD, weight_ED, bias_E, False)


def logits_and_input(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The logits, and x to go on with.

    What is computed from the x that comes back has its gradient added where the router's own is made, which
    spares a pass over ``[T, D]``. An x that needs no gradient comes back as it is (as an output next to
    the logits it would seem to need one)."""
    if not x_TD.requires_grad:
        return router_logits(x_TD, weight_ED, bias_E), x_TD
    return _Logits.apply(x_TD, weight_ED, bias_E, True)


def choice_scores(logits_TE: Tensor, score: ScoreName) -> Tensor:
    """What experts are compared by: probabilities, or logits when softmax comes after the choice."""
    if score == "softmax_topk":
        return logits_TE.softmax(-1)
    return logits_TE.sigmoid() if score == "sigmoid" else logits_TE


def score_choices(
    logits_TE: Tensor,
    ids_TK: Tensor,
    rule: ScoreRule,
    *,
    scores_TE: Tensor | None = None,
    sequence_ids_T: Tensor | None = None,
    token_mask_T: Tensor | None = None,
) -> Scored:
    """Weights of the chosen experts, and the sums that balance terms are made of.

    ``ids_TK`` may hold -1, whose weight is zero. ``scores_TE`` spares computing :func:`choice_scores` again.
    ``prob_sum_SE`` sums each expert's probability (softmax, or the sigmoids divided by their sum) over the
    counted tokens of each sequence; ``z_sum`` sums the squared log-sum-exp over the counted tokens. Both are
    zeros unless the rule wants them."""
    if scores_TE is None:
        scores_TE = choice_scores(logits_TE.detach(), rule.score)
    return Scored(*_Scores.apply(logits_TE, ids_TK, scores_TE, sequence_ids_T, token_mask_T, rule))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, hand_on: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.sink = sink_of(weight_ED)
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = _wide_product(x_TD, weight_ED)
            if bias_E is not None:
                logits_TE = logits_TE + bias_E
        if not hand_on:
            return logits_TE
        ctx.set_materialize_grads(False)
        return logits_TE, x_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TE: Tensor | None, passed_TD: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad_TE is None:
            return passed_TD, None, None, None
        x_TD, weight_ED = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(x_TD.device.type, enabled=False):
            halves_T2E = None
            if ctx.needs_input_grad[0]:
                grad_x, halves_T2E = _input_gradient(grad_TE, x_TD, weight_ED, passed_TD)
            if ctx.needs_input_grad[1]:
                if halves_T2E is None and _fits_tensor_cores(x_TD, weight_ED):
                    halves_T2E = _two_halves(grad_TE)
                grad_wide_ED = _weight_gradient(grad_TE, halves_T2E, x_TD, weight_ED)
                grad_weight = deliver(grad_wide_ED, ctx.sink, weight_ED.dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                grad_bias = grad_TE.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def _wide_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if _fits_tensor_cores(x_TD, weight_ED):
        return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    weight_DE = weight_ED.to(wide).t()
    if x_TD.dtype == wide:
        return x_TD @ weight_DE
    logits_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=wide)
    for rows in _row_chunks(x_TD):
        torch.mm(x_TD[rows].to(wide), weight_DE, out=logits_TE[rows])
    return logits_TE


def _input_gradient(
    grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, passed_TD: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, ``passed_TD`` included, and the two halves of ``grad_TE`` if it was made of them."""
    if not _fits_tensor_cores(x_TD, weight_ED):
        return _wide_input_gradient(grad_TE, x_TD, weight_ED, passed_TD), None
    fused = triton_for(grad_TE)
    if fused is not None and fused.supports_router_grad(weight_ED):
        return fused.router_input_grad(grad_TE, weight_ED, passed_TD)
    halves_T2E = _two_halves(grad_TE)
    grad_x = halves_T2E @ torch.cat((weight_ED, weight_ED))
    return grad_x if passed_TD is None else grad_x + passed_TD, halves_T2E


def _wide_input_gradient(
    grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, passed_TD: Tensor | None
) -> Tensor:
    weight_ED = weight_ED.to(grad_TE.dtype)
    if x_TD.dtype == grad_TE.dtype:
        return grad_TE @ weight_ED if passed_TD is None else torch.addmm(passed_TD, grad_TE, weight_ED)
    grad_x = torch.empty_like(x_TD)
    for rows in _row_chunks(x_TD):
        wide = grad_TE[rows] @ weight_ED
        grad_x[rows] = wide if passed_TD is None else wide.add_(passed_TD[rows])
    return grad_x


def _weight_gradient(grad_TE: Tensor, halves_T2E: Tensor | None, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """In fp32, so that a sink of that precision loses nothing."""
    if halves_T2E is not None:
        both_2ED = torch.mm(halves_T2E.t(), x_TD, out_dtype=torch.float32)
        return both_2ED.unflatten(0, (2, -1)).sum(0)
    if x_TD.dtype == grad_TE.dtype:
        return grad_TE.t() @ x_TD
    grad_ED = grad_TE.new_zeros(weight_ED.shape)
    for rows in _row_chunks(x_TD):
        grad_ED.addmm_(grad_TE[rows].t(), x_TD[rows].to(grad_TE.dtype))
    return grad_ED


def _fits_tensor_cores(x_TD: Tensor, weight_ED: Tensor) -> bool:
    """bf16 products are exact in fp32, so the tensor cores give fp32 logits without any fp32 copy."""
    return x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16


def _two_halves(grad_TE: Tensor) -> Tensor:
    """An fp32 gradient as two bf16 ones side by side, ``[T, 2E]``: 16 bits of mantissa on tensor cores."""
    high_TE = grad_TE.to(torch.bfloat16)
    return torch.cat((high_TE, (grad_TE - high_TE).to(torch.bfloat16)), dim=1)


def _row_chunks(x_TD: Tensor) -> list[slice]:
    step = max(1, _CHUNK_BYTES // (4 * x_TD.shape[1]))
    return [slice(start, start + step) for start in range(0, x_TD.shape[0], step)]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        ids_TK: Tensor,
        scores_TE: Tensor,
        sequence_ids_T: Tensor | None,
        token_mask_T: Tensor | None,
        rule: ScoreRule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TE, ids_TK, sequence_ids_T, token_mask_T)
        ctx.rule = rule
        prob_sum_SE = logits_TE.new_zeros(rule.num_sequences, logits_TE.shape[1])
        z_sum = logits_TE.new_zeros(())
        if rule.want_sums:
            counted_TE = _masked(_probabilities(logits_TE, scores_TE, rule.score), token_mask_T)
            if sequence_ids_T is None or rule.num_sequences == 1:
                prob_sum_SE = counted_TE.sum(0, keepdim=True)
            else:
                prob_sum_SE = prob_sum_SE.index_add(0, sequence_ids_T, counted_TE)
        if rule.want_z:
            z_sum = _masked(logits_TE.logsumexp(-1, keepdim=True).square(), token_mask_T).sum()
        weights_TK = _weights(_chosen(scores_TE, ids_TK, rule), ids_TK, rule)
        return weights_TK * rule.scaling if rule.scaling != 1.0 else weights_TK, prob_sum_SE, z_sum

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TK: Tensor | None, grad_sum_SE: Tensor | None, grad_z: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits_TE, ids_TK, sequence_ids_T, token_mask_T = ctx.saved_tensors
        rule: ScoreRule = ctx.rule
        scores_TE = choice_scores(logits_TE, rule.score)
        grad_TE = torch.zeros_like(logits_TE)  # of the choice scores, until the score function's own backward
        if grad_TK is not None:
            grad_TK = _weights_backward(grad_TK, _chosen(scores_TE, ids_TK, rule), ids_TK, rule)
            grad_TE.scatter_add_(1, ids_TK if rule.complete else ids_TK.clamp_min(0), grad_TK)
        grad_prob_TE = None
        if rule.want_sums and grad_sum_SE is not None:
            spread = sequence_ids_T is not None and rule.num_sequences > 1
            grad_prob_TE = grad_sum_SE[sequence_ids_T] if spread else grad_sum_SE.expand_as(logits_TE)
            grad_prob_TE = _masked(grad_prob_TE, token_mask_T)
        grad_TE = _score_backward(grad_TE, grad_prob_TE, logits_TE, scores_TE, rule.score)
        if rule.want_z and grad_z is not None:
            probs_TE = scores_TE if rule.score == "softmax_topk" else logits_TE.softmax(-1)
            slope_T1 = _masked(2 * grad_z * logits_TE.logsumexp(-1, keepdim=True), token_mask_T)
            grad_TE = grad_TE.addcmul(probs_TE, slope_T1)
        return grad_TE, None, None, None, None, None


def _masked(values_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    return values_TX if token_mask_T is None else values_TX * token_mask_T.unsqueeze(1)


def _probabilities(logits_TE: Tensor, scores_TE: Tensor, score: ScoreName) -> Tensor:
    """Each token's distribution over the experts, for balance: it sums to one under every score function."""
    if score == "sigmoid":
        return scores_TE / _sum(scores_TE)
    return scores_TE if score == "softmax_topk" else logits_TE.softmax(-1)


def _chosen(scores_TE: Tensor, ids_TK: Tensor, rule: ScoreRule) -> Tensor:
    """Scores of the chosen; where nothing was chosen, what leaves the others' weights alone."""
    if rule.complete:
        return scores_TE.gather(1, ids_TK)
    nothing = float("-inf") if rule.score == "topk_softmax" else 0.0
    return scores_TE.gather(1, ids_TK.clamp_min(0)).masked_fill(ids_TK < 0, nothing)


def _weights(chosen_TK: Tensor, ids_TK: Tensor, rule: ScoreRule) -> Tensor:
    """Weights before scaling."""
    if rule.score == "topk_softmax":
        weights_TK = chosen_TK.softmax(-1)
        # Where none is chosen, the softmax is NaN.
        return weights_TK if rule.complete else weights_TK.masked_fill(ids_TK < 0, 0.0)
    return chosen_TK / _sum(chosen_TK) if rule.normalise else chosen_TK


def _weights_backward(grad_TK: Tensor, chosen_TK: Tensor, ids_TK: Tensor, rule: ScoreRule) -> Tensor:
    """Gradient of the chosen scores; zero where nothing was chosen."""
    if rule.scaling != 1.0:
        grad_TK = grad_TK * rule.scaling
    if rule.score == "topk_softmax":
        return _softmax_backward(grad_TK, _weights(chosen_TK, ids_TK, rule))
    if rule.normalise:
        total_T1 = _sum(chosen_TK)
        mean_T1 = (grad_TK * chosen_TK).sum(-1, keepdim=True) / total_T1
        grad_TK = (grad_TK - mean_T1) / total_T1
    return grad_TK if rule.complete else grad_TK.masked_fill(ids_TK < 0, 0.0)


def _score_backward(
    grad_TE: Tensor, grad_prob_TE: Tensor | None, logits_TE: Tensor, scores_TE: Tensor, score: ScoreName
) -> Tensor:
    """Gradient of the logits from those of the choice scores and of the balance probabilities."""
    if score == "sigmoid":
        if grad_prob_TE is not None:
            total_T1 = _sum(scores_TE)
            mean_T1 = (grad_prob_TE * scores_TE).sum(-1, keepdim=True) / total_T1
            grad_TE = grad_TE + (grad_prob_TE - mean_T1) / total_T1
        return grad_TE * scores_TE * (1 - scores_TE)
    if score == "softmax_topk":
        return _softmax_backward(grad_TE if grad_prob_TE is None else grad_TE + grad_prob_TE, scores_TE)
    if grad_prob_TE is not None:
        grad_TE = grad_TE + _softmax_backward(grad_prob_TE, logits_TE.softmax(-1))
    return grad_TE


def _softmax_backward(grad_TX: Tensor, probs_TX: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad_TX, probs_TX, -1, probs_TX.dtype)


def _sum(values_TX: Tensor) -> Tensor:
    """Never zero, so that a token without any choice gives zeros; changes no sum above 1e-20."""
    return values_TX.sum(-1, keepdim=True).clamp_min(1e-20)
