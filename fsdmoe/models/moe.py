"""The MoE layer of each architecture: its facts in the terms of :mod:`fsdmoe.experts`."""

from __future__ import annotations

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.router import Router
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.models.config import ModelConfig


def build_moe(config: ModelConfig, experts: ExpertsConfig) -> MoE:
    """A whole layer, to be split later."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    return MoE(
        Router(config.router_spec(), hidden, experts),
        GroupedExperts(config.num_experts, hidden, width, weight_after=experts.weight_after),
        shared_experts=SharedExperts(hidden, config.n_shared_experts * width)
        if config.n_shared_experts
        else None,
    )
