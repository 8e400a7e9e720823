"""Tiny transformers models and the fsdmoe configurations that must equal them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe.checkpoint.gpt_oss import in_memory, on_disk
from fsdmoe.checkpoint.hf_names import Names
from fsdmoe.models import Decoder, ModelConfig, preset_config


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "num_experts_per_tok": config.num_experts_per_tok, "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_parameters(config),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    stated = {key: list(v) if isinstance(v, tuple) else v for key, v in config.rope.stated.items()}
    table = {"rope_type": config.rope.type, "rope_theta": config.rope_theta, **stated}
    if config.architecture != "glm4_moe":  # to the others it means nothing
        return table
    return table | {"partial_rotary_factor": config.partial_rotary_factor}


def hf_model(config: ModelConfig, *, std: float = 0.3, **changes: Any) -> nn.Module:
    """The transformers model that ``config`` describes, with random weights that make routing and norms
    matter."""
    import transformers

    common = _common(config) | changes
    if config.architecture == "qwen3_moe":
        hf_config = transformers.Qwen3MoeConfig(
            **common, moe_intermediate_size=config.moe_intermediate_size, num_experts=config.num_experts,
            norm_topk_prob=config.norm_topk_prob, intermediate_size=config.intermediate_size,
        )  # fmt: skip
        model: nn.Module = transformers.Qwen3MoeForCausalLM(hf_config)
    elif config.architecture == "mixtral":
        hf_config = transformers.MixtralConfig(
            **common, intermediate_size=config.moe_intermediate_size, num_local_experts=config.num_experts,
            sliding_window=None,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(hf_config)
    elif config.architecture == "gpt_oss":
        kinds = None if config.layer_types is None else list(config.layer_types)
        hf_config = transformers.GptOssConfig(
            **common, intermediate_size=config.moe_intermediate_size, num_local_experts=config.num_experts,
            sliding_window=config.sliding_window, layer_types=kinds, attention_bias=config.attention_bias,
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(hf_config)
    elif config.architecture == "glm4_moe":
        hf_config = transformers.Glm4MoeConfig(
            **common, **_sigmoid(config), use_qk_norm=config.use_qk_norm, num_mtp_layers=0,
        )  # fmt: skip
        model = transformers.Glm4MoeForCausalLM(hf_config)
    else:
        common["head_dim"] = config.qk_rope_head_dim
        hf_config = transformers.DeepseekV3Config(
            **common, **_sigmoid(config), q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank, qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim, v_head_dim=config.v_head_dim,
        )  # fmt: skip
        model = transformers.DeepseekV3ForCausalLM(hf_config)
    randomize(model, std)
    return model.train()


def _sigmoid(config: ModelConfig) -> dict[str, Any]:
    """Of families that route by sigmoids, with shared experts and first layers without experts."""
    names = (
        "intermediate_size", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
        "routed_scaling_factor", "first_k_dense_replace", "norm_topk_prob", "attention_bias",
    )  # fmt: skip
    return {"n_routed_experts": config.num_experts, **{name: getattr(config, name) for name in names}}


@torch.no_grad()
def randomize(model: nn.Module, std: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        if "norm" in name:
            tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (std if tensor.ndim > 1 else 0.05))


def native_model(config: ModelConfig, hf: nn.Module) -> Decoder:
    """Our decoder with the weights of ``hf``."""
    model = Decoder(config)
    model.load_state_dict(in_native_names(hf.state_dict()) if config.has_sinks else hf.state_dict())
    return model.train()


def in_native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What transformers' gpt-oss has, weights or gradients, as our decoder has it."""
    names = Names.of({"model_type": "gpt_oss"}, native=True)
    pieces = [(names.from_disk(name, tuple(value.shape)), value) for name, value in tensors.items()]
    return {piece.memory: in_memory(value, piece.form) for piece, value in pieces if piece is not None}


def in_transformers_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse."""
    names = Names.of({"model_type": "gpt_oss"}, native=True)
    pieces = [(names.to_disk(name, tuple(value.shape))[0], value) for name, value in tensors.items()]
    return {piece.disk: on_disk(value, piece.form) for piece, value in pieces}


def tiny(architecture: str, **changes: Any) -> ModelConfig:
    names = {
        "qwen3_moe": "tiny-qwen3",
        "mixtral": "tiny-mixtral",
        "deepseek_v3": "tiny-deepseek-v3",
        "glm4_moe": "tiny-glm-4.5",
        "gpt_oss": "tiny-gpt-oss",
    }
    return preset_config(names[architecture], **({"num_nextn_predict_layers": 0} | changes))
