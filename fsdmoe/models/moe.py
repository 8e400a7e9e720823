"""The MoE layer of each architecture: its facts in the terms of :mod:`fsdmoe.experts`."""

from __future__ import annotations

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import RouterSpec
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.router import Router
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.models.config import ModelConfig


def router_spec(config: ModelConfig) -> RouterSpec:
    """How the architecture routes."""
    is_sigmoid = config.architecture == "deepseek_v3"
    return RouterSpec(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        score="sigmoid" if is_sigmoid else "softmax_topk",
        norm_topk=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
        correction_bias=is_sigmoid,
    )


def build_moe(config: ModelConfig, experts: ExpertsConfig) -> MoE:
    """A whole layer, to be split later."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    return MoE(
        Router(router_spec(config), hidden, experts),
        GroupedExperts(config.num_experts, hidden, width, weight_after=experts.weight_after),
        shared_experts=SharedExperts(hidden, config.n_shared_experts * width)
        if config.n_shared_experts
        else None,
    )
