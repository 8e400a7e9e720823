"""config.json of a model: what a checkpoint recorded, or written from the fields of an fsdmoe model."""

from __future__ import annotations

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.tree import Tree

CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "tie_word_embeddings", "initializer_range", "num_experts_per_tok",
)  # fmt: skip
_DEEPSEEK = (
    "intermediate_size", "moe_intermediate_size", "first_k_dense_replace", "n_shared_experts", "n_group",
    "topk_group", "routed_scaling_factor", "norm_topk_prob", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_nextn_predict_layers", "attention_bias",
)  # fmt: skip


def export_config(about: Tree) -> Tree:
    """The configuration to export with, from what a checkpoint says about its model."""
    stated = about.get("hf_config")
    if isinstance(stated, dict):
        return stated
    fields = about.get("model_config")
    if isinstance(fields, dict):
        return config_json(fields)
    raise CheckpointError(
        "the checkpoint does not say what model it is of; pass the folder of a Hugging Face model of the "
        "same shape with --config-from"
    )


def config_json(fields: Tree) -> Tree:
    """config.json for the fields of a ``ModelConfig``."""
    kind = fields.get("architecture")
    if kind not in CLASSES:
        raise CheckpointError(f"expected an architecture of {', '.join(CLASSES)}, got {kind!r}")
    config: Tree = {key: fields[key] for key in _SHARED}
    config |= {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get("max_position_embeddings", 32_768),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["rope_theta"]},
        "rope_theta": fields["rope_theta"],
    }
    if kind == "qwen3_moe":
        config |= {
            key: fields[key]
            for key in ("head_dim", "intermediate_size", "moe_intermediate_size", "attention_bias")
        }
        config |= {"num_experts": fields["num_experts"], "norm_topk_prob": fields["norm_topk_prob"]}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(fields["first_k_dense_replace"]))}
    elif kind == "mixtral":
        config |= {"head_dim": fields["head_dim"], "num_local_experts": fields["num_experts"]}
        config |= {"intermediate_size": fields["moe_intermediate_size"], "sliding_window": None}
    else:
        config |= {key: fields[key] for key in _DEEPSEEK} | {"n_routed_experts": fields["num_experts"]}
        config |= {
            "head_dim": fields["qk_rope_head_dim"],
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    return config


def model_fields(config: Tree) -> Tree:
    """The fields of a ``ModelConfig`` for a config.json: what a run that starts from it must write."""
    kind = config.get("model_type")
    if kind not in CLASSES:
        raise CheckpointError(f"config.json: expected a model_type of {', '.join(CLASSES)}, got {kind!r}")
    fields: Tree = {"architecture": kind, **{key: config[key] for key in _SHARED if key in config}}
    rope = config.get("rope_parameters") or {}
    fields["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in config:
            fields["num_experts"] = config[key]
    if kind == "deepseek_v3":
        fields |= {key: config[key] for key in _DEEPSEEK if key in config}
    else:
        heads = config.get("num_attention_heads") or 1
        fields["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
        width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
        fields["moe_intermediate_size"] = config[width]
        fields |= {key: config[key] for key in ("norm_topk_prob", "attention_bias") if key in config}
    return fields
