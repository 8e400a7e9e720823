"""Tiny transformers models of every family that the drop-in path must take."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.hf_pairs import randomize

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "gpt_oss")
VOCABULARY = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "attention_dropout": 0.0, "intermediate_size": 24,
}  # fmt: skip
_AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
_GROUPED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 12, **_AUX}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 8, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, **_AUX},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None, **_AUX}),
    "deepseek_v2": (
        "DeepseekV2",
        {**_GROUPED, **_LATENT, "topk_method": "group_limited_greedy", "num_experts": 8},
    ),
    "deepseek_v3": ("DeepseekV3", {**_GROUPED, **_LATENT}),
    "glm4_moe": ("Glm4Moe", {**_GROUPED, "num_local_experts": 8, "partial_rotary_factor": 0.5}),
    "olmoe": ("Olmoe", {"num_experts": 8, **_AUX}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 8, **_AUX}),
    "granite_shared": (  # a shared expert beside the block with the routed ones
        "GraniteMoeShared",
        {"num_local_experts": 4, "shared_intermediate_size": 12, "logits_scaling": 2.0, **_AUX},
    ),
    "diffllama": ("DiffLlama", {"num_attention_heads": 4}),
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama dynamic": (  # documents of more than four tokens are scaled
        "Llama",
        {"max_position_embeddings": 4,
         "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    import transformers

    name, own = _CONFIGS[family]
    settings = copy.deepcopy(_COMMON | own | changes)  # transformers writes into the rotary parameters
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    kept = getattr(transformers, f"{name}PreTrainedModel")._can_record_outputs or {}
    if "output_router_logits" in own and "router_logits" not in kept:
        config.output_router_logits = False  # granite's in 5.17: transformers fails with it, and labels
    return config


def tiny_hf(family: str, *, randomized: bool = True, **changes: Any) -> nn.Module:
    """A model of two layers with random weights that make routing and norms matter."""
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    if randomized:
        randomize(model, 0.3)
    return model.train()


def batch(step: int, rank: int, *, rows: int = 1, length: int = 8) -> torch.Tensor:
    """Token ids that differ by step and rank."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (rows, length), generator=random)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Plain steps on this rank's batches; their losses."""
    losses = []
    for step in steps:
        tokens = batch(step, dist.get_rank())
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
