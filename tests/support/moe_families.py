"""Tiny configurations of every MoE family that transformers builds as a causal language model.

A family is taken as transformers writes it, with sizes made small wherever its configuration has them under
the usual names (``_SIZES``); ``_OWN`` holds what is particular. Every kind of layer of a family is there, at
least once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 64

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "sliding_window": 6,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "index_topk": 4, "index_head_dim": 16, "index_n_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "attention_dropout": 0.0, "router_jitter_noise": 0.0, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_INDEXED = "indexed_attention"
_ALL_INDEXED = {"layer_types": [_INDEXED, _INDEXED]}
_DENSE_THEN_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_ALL_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_EVERY_HEAD = {"num_key_value_heads": 4}  # latent attention: as many keys as queries
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_OWN: dict[str, dict[str, Any]] = {
    "afmoe": {**_WINDOWS, "num_dense_layers": 1, "num_shared_experts": 1},
    "aria_text": {},
    "axk1": {**_DENSE_THEN_SPARSE, **_EVERY_HEAD},
    "axk2": {**_DENSE_THEN_SPARSE, **_ALL_INDEXED, **_EVERY_HEAD},
    "bailing_hybrid": {**_LINEAR, **_DENSE_THEN_SPARSE, **_EVERY_HEAD},
    "beam": {**_WINDOWS, **_DENSE_THEN_SPARSE},
    "cohere2_moe": {**_WINDOWS, **_DENSE_THEN_SPARSE},
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "deepseek_v2": _EVERY_HEAD,
    "deepseek_v3": _EVERY_HEAD,
    "deepseek_v32": {**_DENSE_THEN_SPARSE, **_ALL_INDEXED, **_EVERY_HEAD},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"], "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "qk_rope_head_dim": 4, "hc_mult": 2,
    },
    "doge": {"is_moe": True, "num_experts": 16, "sliding_window": None},
    "dots1": {"layer_types": ["full_attention", "full_attention"], "n_shared_experts": 1},
    "ernie4_5_moe": {
        "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    },
    "exaone_moe": {**_WINDOWS, **_DENSE_THEN_SPARSE},
    "flex_olmo": {},
    "flint": {**_WINDOWS, "mlp_only_layers": [0]},
    "gemma4_text": {
        **_WINDOWS, "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16,
    },
    "glm4_moe": {"num_mtp_layers": 0},
    "glm4_moe_lite": {**_DENSE_THEN_SPARSE, **_EVERY_HEAD},
    "glm_moe_dsa": {**_DENSE_THEN_SPARSE, **_ALL_INDEXED, **_EVERY_HEAD},
    "gpt_oss": _WINDOWS,
    "granitemoe": {},
    "granitemoe_swa": _WINDOWS,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_chunk_size": 16,
    },
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": _DENSE_THEN_SPARSE,
    "hy_v4": {**_DENSE_THEN_SPARSE, **_ALL_INDEXED, **_EVERY_HEAD, "hc_mult": 2},
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"], **_DENSE_THEN_SPARSE, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16,
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 8, "num_attention_heads": 4},
    "kimi_linear": {
        **_LINEAR, **_DENSE_THEN_SPARSE, **_EVERY_HEAD, "linear_head_dim": 8, "linear_num_heads": 4,
        "q_lora_rank": None,
    },
    "kolibri1": _WINDOWS,
    "laguna": {**_WINDOWS, **_DENSE_THEN_SPARSE, "num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "moe_layers": [0, 1], "attention_chunk_size": 6, "intermediate_size_mlp": 24,
        "num_experts_per_tok": 1,
    },
    "longcat_flash": {
        "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16,
        "zero_expert_num": 4, **_EVERY_HEAD,
    },
    "mellum": {**_WINDOWS, **_ALL_SPARSE},
    "mimo_v2_flash": {**_WINDOWS, **_DENSE_THEN_SPARSE},
    "minimax": {**_LINEAR, "block_size": 8, "sliding_window": None},
    "minimax_m2": {"sliding_window": None},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"], **_DENSE_THEN_SPARSE,
        "dense_intermediate_size": 24, "rotary_dim": 4, "index_block_size": 4, "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "mixtral": {"sliding_window": None},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16,
        "use_mamba_kernels": False, "moe_shared_expert_intermediate_size": 16, "sliding_window": None,
    },
    "olmoe": {},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"sliding_window": None},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_moe": {"sliding_window": None},
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", _INDEXED], "hc_count": 2, "hc_lowrank": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8, "sliding_window": None},
}  # fmt: skip

MODEL_TYPES = tuple(sorted(_OWN))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A tiny configuration of a family; ``changes`` are keys of its own."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(model_type)
    known = usual.to_dict().keys() | usual.attribute_map.keys()
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    own = dict(_OWN[model_type])
    if _INDEXED in own.get("layer_types", ()):  # it has other names in older versions of transformers
        name = next(kind for kind in usual.layer_types if kind != "linear_attention")
        own["layer_types"] = [name if kind == _INDEXED else kind for kind in own["layer_types"]]
    return AutoConfig.for_model(model_type, **(sizes | own | changes))


def tiny_model(model_type: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model of a family, with random weights (embeddings, norms, gates and biases too) that make every
    part of it matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **changes), dtype=torch.float32
    )
    spread_weights(model, seed)
    return model.train()


@torch.no_grad()
def spread_weights(model: nn.Module, seed: int = 0) -> None:
    """Move every parameter away from what it is initialised with, so that no gate is shut and no router is
    undecided. Buffers stay."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        scale = 0.2 if tensor.ndim > 1 else 0.05
        tensor.add_(scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def is_installed(model_type: str) -> bool:
    """Whether this transformers has the family, and can run it: the table is that of the newest."""
    from transformers import CONFIG_MAPPING, __version__

    # Doge's MoE layer hands a pair to its dropout in 5.17: TypeError in a plain forward.
    is_broken = model_type == "doge" and tuple(map(int, __version__.split(".")[:2])) < (5, 22)
    return model_type in CONFIG_MAPPING and not is_broken


def installed() -> list[str]:
    """The MoE families that the installed transformers builds: their configurations speak of experts."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def speaks_of_experts(model_type: str) -> bool:
        try:
            keys = CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # a configuration without defaults
            return False
        return any("expert" in key for part in (keys, keys.get("ffn_config") or {}) for key in part)

    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if speaks_of_experts(name)]
