"""The MoE layer of each architecture: its facts in the terms of :mod:`fsdmoe.experts`."""

from __future__ import annotations

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.router import Router
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.kernels.linear import Linear
from fsdmoe.models.config import ModelConfig


def build_moe(config: ModelConfig, experts: ExpertsConfig) -> MoE:
    """A whole layer, to be split later."""
    hidden, width, latent = config.hidden_size, config.moe_intermediate_size, config.moe_latent_size
    shared = SharedExperts(hidden, config.n_shared_experts * width) if config.n_shared_experts else None
    is_gated, is_gpt_oss = config.shared_expert_gate, config.architecture == "gpt_oss"
    return MoE(
        Router(config.router_spec(), hidden, experts),
        GroupedExperts(
            config.num_experts,
            latent or hidden,
            width,
            activation="gpt_oss" if is_gpt_oss else "swiglu",
            bias=is_gpt_oss,
            weight_after=experts.weight_after,
            sequential=experts.compute == "sequential",
        ),
        shared_experts=None if is_gated else shared,
        shared_expert=shared if is_gated else None,
        shared_expert_gate=Linear(hidden, 1, bias=False) if is_gated else None,
        latent=None
        if latent is None
        else (Linear(hidden, latent, bias=False), Linear(latent, hidden, bias=False)),
    )
