"""The router: hidden states in, experts and weights out, with this layer's balance terms and loads.

::

    x_TD ─ fp32 logits ─┬─ choose: top-k, groups, expert choice, round-robin, replay ─┬─ capacity ─ ids_TK
                        ├─ scores of the chosen, renormalised, scaled ────────────────┴─────────── weights_TK
                        └─ sums over sequences ─ balance terms ─────────────────────────────────── loss

It keeps nothing between calls. Loads and losses are returned, so recomputing a layer counts no token twice,
and an evaluation or a skipped step leaves no trace.

Legend: T tokens, D hidden width, E experts, K choices a token, S sequences, G groups of M experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from fsdmoe.experts.balance import balance_loss, count_choices
from fsdmoe.experts.capacity import even_share, pad_to_capacity, within_capacity
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import Routing, RoutingContext
from fsdmoe.experts.expert_choice import select_by_experts
from fsdmoe.experts.fused_router import FusedRouting, balance_fused, route_fused
from fsdmoe.experts.replay import Decision
from fsdmoe.experts.round_robin import select_round_robin
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.scores import Scored, ScoreRule, choice_scores, logits_and_input, score_choices
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.router_policy import ScoreName
from fsdmoe.memory.calls import plain_calls

__all__ = ["Router", "RouterSpec", "Routing", "RoutingContext", "RoutingRules", "select_top_k"]


class RoutingRules:
    """How logits become a :class:`Routing`: what an architecture and the policies of a run say together.

    Our own routers and those of wrapped models (:mod:`fsdmoe.huggingface.routing`) call it with their logits.
    """

    def __init__(self, spec: RouterSpec, config: ExpertsConfig) -> None:
        self.spec = spec
        self.config = config
        self._rule = _rule_of(spec, config)
        """How scores become weights where one sequence is routed and nothing is replayed."""

    def __call__(
        self, logits_TE: Tensor, x_TD: Tensor, correction_bias_E: Tensor | None, context: RoutingContext
    ) -> Routing:
        """The decision for tokens ``x_TD``; ``correction_bias_E`` moves the choice only."""
        by_sequence = self.config.balance.uses_sequences and context.num_sequences > 1
        num_sequences = context.num_sequences if by_sequence else 1
        recorded = None
        fused = None
        if triton_for(logits_TE) is not None:
            fused = self._fused(logits_TE, correction_bias_E, context, num_sequences)
        if fused is not None:
            ids_TK, scored, load_SE, _ = fused
        else:
            ids_TK, scored, recorded = self._scored(logits_TE, correction_bias_E, context, num_sequences)
            load_SE = count_choices(
                ids_TK, self.spec.num_experts, num_sequences=num_sequences, context=context
            )
        weights_TK = scored.weights_TK
        if recorded is not None and context.replay.enforce == "ids_and_weights":  # type: ignore[union-attr]
            weights_TK = recorded.weights_TK + (weights_TK - weights_TK.detach())  # the difference is zero
        if context.num_global_tokens is None:
            context = _with_own_count(context, x_TD)
        balance = self.config.balance
        balanced = None if fused is None else balance_fused(fused.sums, balance, context)
        if balanced is None:
            loss = balance_loss(load_SE, scored.prob_sum_SE, scored.z_sum, balance, context)
            load_E = load_SE[0] if num_sequences == 1 else load_SE.sum(0)
        else:
            loss, load_E = balanced
        # Of several sequences, the sum over all is for a term over all layers alone.
        prob_sum_E = scored.prob_sum_SE[0]
        if num_sequences > 1 and (balance.transformers or balanced is None):
            prob_sum_E = scored.prob_sum_SE.sum(0)
        if self.config.capacity is not None or context.replay is not None:
            ids_TK, weights_TK = self._limited(ids_TK, weights_TK, context, recorded)
        return Routing(weights_TK, ids_TK, load_E, loss, prob_sum_E, x_TD)

    def _fused(
        self, logits_TE: Tensor, bias_E: Tensor | None, context: RoutingContext, num_sequences: int
    ) -> FusedRouting | None:
        """One kernel for the usual case; None where only the plain path can decide."""
        replays = context.replay is not None and context.replay.replays
        if replays or self.config.selection != "top_k":
            return None
        return route_fused(logits_TE, bias_E, self.spec, context, num_sequences)

    def _scored(
        self, logits_TE: Tensor, bias_E: Tensor | None, context: RoutingContext, num_sequences: int
    ) -> tuple[Tensor, Scored, Decision | None]:
        """Ids, weights and sums by the plain path, and the recorded decision if one was enforced."""
        with torch.no_grad():
            scores_TE = choice_scores(logits_TE, self._rule.score)
            ids_TK = self._choose(scores_TE, bias_E, context)
            recorded = None if context.replay is None else self._recorded(ids_TK, context)
            if recorded is not None:
                ids_TK = recorded.ids_TK
        rule = self._rule
        if num_sequences > 1 or recorded is not None:
            is_complete = rule.complete and recorded is None
            rule = replace(rule, num_sequences=num_sequences, complete=is_complete)
        scored = score_choices(
            logits_TE, ids_TK, rule, scores_TE=scores_TE,
            sequence_ids_T=context.sequence_ids_T if num_sequences > 1 else None,
            token_mask_T=context.token_mask_T,
        )  # fmt: skip
        return ids_TK, scored, recorded

    def _choose(self, scores_TE: Tensor, bias_E: Tensor | None, context: RoutingContext) -> Tensor:
        if self.config.selection == "forced_balance":
            return select_round_robin(scores_TE.shape[0], self.spec, scores_TE.device)
        if self.config.selection == "expert_choice":
            mask_T = None if context.token_mask_T is None else context.token_mask_T.bool()
            return select_by_experts(scores_TE, self.spec.top_k, self.config.expert_choice, mask_T)
        return select_top_k(scores_TE, self.spec, bias_E)

    def _recorded(self, ids_TK: Tensor, context: RoutingContext) -> Decision | None:
        assert context.replay is not None
        if not context.replay.replays:
            return None
        return context.replay.decision(context.place, like=ids_TK, num_experts=self.spec.num_experts)

    def _limited(
        self, ids_TK: Tensor, weights_TK: Tensor, context: RoutingContext, recorded: Decision | None
    ) -> tuple[Tensor, Tensor]:
        """Apply capacity (the recorded one on replay), and record the decision on a recording tape."""
        capacity, num_experts = self.config.capacity, self.spec.num_experts
        kept_TK = None
        if recorded is not None:
            kept_TK = recorded.kept_TK
        elif capacity is not None:
            with torch.no_grad():
                kept_TK = within_capacity(ids_TK, weights_TK, num_experts, capacity, context)
        if context.replay is not None and not context.replay.replays:
            context.replay.record(context.place, Decision(ids_TK, weights_TK, kept_TK), num_experts)
        if kept_TK is not None:
            ids_TK = ids_TK.masked_fill(~kept_TK, -1)
            weights_TK = weights_TK.masked_fill(~kept_TK, 0.0)
        if capacity is not None and capacity.pad_to_max:
            rows = even_share(ids_TK.shape[0] * self.spec.top_k, num_experts, capacity.factor)
            ids_TK, weights_TK = pad_to_capacity(ids_TK, weights_TK, num_experts, rows)
        return ids_TK, weights_TK


class Router(nn.Module):
    """Names as in Hugging Face: ``weight [E, D]``, ``bias [E]``, ``e_score_correction_bias [E]``."""

    e_score_correction_bias: Tensor | None

    def __init__(self, spec: RouterSpec, hidden_size: int, config: ExpertsConfig | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.config = ExpertsConfig() if config is None else config
        self.memory_calls = plain_calls("router")
        self._rules = RoutingRules(spec, self.config)
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.router_bias else None
        # Balancing by bias gives a bias to routers whose architecture has none.
        biased = spec.correction_bias or self.config.balance.bias_rate > 0
        bias_E = torch.empty(spec.num_experts, dtype=torch.float32) if biased else None
        self.register_buffer("e_score_correction_bias", bias_E)
        is_added = biased and not spec.correction_bias
        self.added_buffers = ("e_score_correction_bias",) if is_added else ()
        """What no Hugging Face folder of the architecture has: loading one leaves it as it is."""
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        if self.weight.is_meta:
            return  # nothing to fill, and initialising on meta loads modules that take seconds
        nn.init.normal_(self.weight, std=std)
        for offset_E in (self.bias, self.e_score_correction_bias):
            if offset_E is not None:
                nn.init.zeros_(offset_E)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{self.weight.shape[1]} -> top {spec.top_k} of {spec.num_experts}, {spec.score}"

    def forward(self, x_TD: Tensor, *, context: RoutingContext | None = None) -> Routing:
        context = RoutingContext() if context is None else context
        logits_TE, x_TD = self.memory_calls["router"](logits_and_input, x_TD, self.weight, self.bias)
        return self._rules(logits_TE, x_TD, self.e_score_correction_bias, context)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Casting the model to bf16 must not round the biases: their steps are smaller than bf16 can add."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            kept = before.to(device=after.device) if not before.is_meta else after.to(torch.float32)
            self.e_score_correction_bias = kept
        return self


def _rule_of(spec: RouterSpec, config: ExpertsConfig) -> ScoreRule:
    experts_choose = config.selection == "expert_choice"
    score: ScoreName = spec.score
    if experts_choose and score == "topk_softmax":
        score = "softmax_topk"  # experts compare tokens by probabilities
    return ScoreRule(
        score,
        normalise=spec.norm_topk and not experts_choose,
        scaling=spec.scaling,
        want_sums=config.balance.uses_probabilities,
        want_z=config.balance.z_loss > 0,
        complete=not experts_choose,
    )


def _with_own_count(context: RoutingContext, x_TD: Tensor) -> RoutingContext:
    """Without a count for the step, this call's own tokens are all there are."""
    counted = x_TD.shape[0] if context.token_mask_T is None else context.token_mask_T.sum()
    return replace(context, num_global_tokens=counted)


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
