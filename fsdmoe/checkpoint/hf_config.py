"""config.json of a model: what a checkpoint recorded, or written from the fields of an fsdmoe model."""

from __future__ import annotations

from collections.abc import Sequence

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.hf_held import CLASSES, not_held
from fsdmoe.checkpoint.hf_rope import SPELLINGS, read_rope, write_rope
from fsdmoe.checkpoint.hf_understood import DEEPSEEK, GLM, SHARED, not_understood
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.kernels.activations import GPT_OSS_LIMIT
from fsdmoe.models.config import PRESETS, gpt_oss_turns
from fsdmoe.models.rope_config import RopeConfig

# transformers' own, for configurations that leave a key out
_DEFAULTS: dict[str, Tree] = {
    "qwen3_moe": {
        "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "norm_topk_prob": False,
        "max_position_embeddings": 32_768,
    },
    "mixtral": {
        "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
        "max_position_embeddings": 131_072,
    },
    "deepseek_v3": {
        "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
    },
    "glm4_moe": {
        "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "max_position_embeddings": 131_072,
        "partial_rotary_factor": 0.5, "use_qk_norm": False, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "attention_bias": True,
        "max_position_embeddings": 131_072, "head_dim": 64,
    },
}  # fmt: skip
_GPT_OSS_WINDOW = 128
_GPT_OSS_ROPE = PRESETS["gpt-oss-20b"]["rope"]  # transformers' own, where a config.json has no table of rope
_COMPUTED = (
    "rope_theta", "partial_rotary_factor", "rms_norm_eps", "num_experts_per_tok", "norm_topk_prob", "n_group",
    "topk_group", "routed_scaling_factor", "sliding_window",
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
    refuse_not_held(fields)
    kind = fields["architecture"]
    config: Tree = {key: fields[key] for key in SHARED}
    config |= {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get("max_position_embeddings", 32_768),
        **write_rope(fields),
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
    elif kind == "gpt_oss":
        config |= {"head_dim": fields["head_dim"], "num_local_experts": fields["num_experts"]}
        config |= {"intermediate_size": fields["moe_intermediate_size"], "swiglu_limit": GPT_OSS_LIMIT}
        # Where no layer has a window transformers wants one all the same, and applies it to none.
        config |= {"sliding_window": fields["sliding_window"] or _GPT_OSS_WINDOW}
        config |= {"attention_bias": fields["attention_bias"], "layer_types": _layer_types(fields)}
    elif kind == "glm4_moe":
        config |= {key: fields[key] for key in GLM} | {"n_routed_experts": fields["num_experts"]}
    else:
        config |= {key: fields[key] for key in DEEPSEEK} | {"n_routed_experts": fields["num_experts"]}
        # Latent attention has a key for every query, whatever the field says.
        config |= {"num_key_value_heads": fields["num_attention_heads"]}
        config |= {
            "head_dim": fields["qk_rope_head_dim"],
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    return config


def refuse_not_held(fields: Tree, *, has_bias: bool = False, selection: str = "top_k") -> None:
    """Raise where transformers cannot hold a model of these ``ModelConfig`` fields; see :func:`not_held`."""
    lines = not_held(fields, has_bias=has_bias, selection=selection)
    refuse_lines(CLASSES.get(str(fields.get("architecture")), "any model"), lines)


def refuse_lines(kind: str, lines: Sequence[str]) -> None:
    """Raise if there are any, of what ``kind`` of transformers does not hold."""
    if lines:
        raise CheckpointError(
            f"the checkpoint cannot be exported to {kind} of transformers, which computes something else:\n  "
            + "\n  ".join(lines)
            + "\n  keep the checkpoint as it is, or train without"
        )


def _layer_types(fields: Tree) -> list[str]:
    """Of gpt-oss, layer by layer."""
    count, stated = fields["num_hidden_layers"], fields.get("layer_types")
    if fields["sliding_window"] is None:
        return ["full_attention"] * count
    return list(stated) if stated is not None else gpt_oss_turns(count)


def refuse_unknown(config: Tree, where: str) -> None:
    """Raise unless the native decoder computes what a config.json says; the message names the keys."""
    problems = not_understood(config)
    if problems:
        raise CheckpointError(
            f"{where}: the native decoder would compute something else than this model does:\n  "
            + "\n  ".join(problems)
            + "\n  train it as it is with model.hf (transformers computes it); where a key changes nothing, "
            "drop it from config.json"
        )


def model_fields(config: Tree) -> Tree:
    """The fields of a ``ModelConfig`` for a config.json: what a run that starts from it must write. What the
    native decoder does not compute is an error."""
    refuse_unknown(config, "config.json")
    kind = config["model_type"]
    stated = _DEFAULTS[kind] | {key: value for key, value in config.items() if value is not None}
    fields: Tree = {"architecture": kind, **{key: stated[key] for key in SHARED if key in stated}}
    found = read_rope(config)
    fields["rope_theta"] = found.theta or stated["rope_theta"]
    fields |= {"max_position_embeddings": stated["max_position_embeddings"], "rope": found.rope}
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in stated:
            fields["num_experts"] = stated[key]
    if kind == "deepseek_v3":
        fields |= {key: stated[key] for key in DEEPSEEK if key in stated}
        if "q_lora_rank" in config:  # null is a value: queries are projected directly
            fields["q_lora_rank"] = config["q_lora_rank"]
        return fields
    heads = stated.get("num_attention_heads") or 1
    fields["head_dim"] = stated.get("head_dim") or stated["hidden_size"] // heads
    if kind == "gpt_oss":
        return fields | _gpt_oss_fields(config, stated)
    if kind == "glm4_moe":
        fields["partial_rotary_factor"] = found.partial or stated["partial_rotary_factor"]
        return fields | {key: stated[key] for key in GLM if key in stated}
    width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    fields["moe_intermediate_size"] = stated[width]
    fields |= {key: stated[key] for key in ("norm_topk_prob", "attention_bias") if key in stated}
    if stated.get("mlp_only_layers"):
        fields["first_k_dense_replace"] = len(stated["mlp_only_layers"])
        fields["intermediate_size"] = stated["intermediate_size"]
    return fields


def _gpt_oss_fields(config: Tree, stated: Tree) -> Tree:
    """What transformers takes for granted where a key is not there included."""
    kinds, turns = stated.get("layer_types"), gpt_oss_turns(stated["num_hidden_layers"])
    fields: Tree = {
        "attention_bias": stated["attention_bias"],
        "moe_intermediate_size": stated["intermediate_size"],
        "sliding_window": config.get("sliding_window", _GPT_OSS_WINDOW),
        "layer_types": None if kinds is None or kinds == turns else tuple(kinds),
    }
    has_rope = any(config.get(key) is not None for key in SPELLINGS)
    return fields if has_rope else fields | {"rope": _GPT_OSS_ROPE}


def differing_fields(config: Tree, fields: Tree) -> list[str]:
    """Where a decoder of these ``ModelConfig`` fields computes otherwise than the config.json of its weights,
    although it could compute the same. Widths are left out: they do not fit then."""
    stated = model_fields(config)
    there, here = (_scaling_of(each) for each in (stated, fields))
    return [
        f"{key} {stated[key]!r} there, {fields[key]!r} here"
        for key in _COMPUTED
        if key in stated and key in fields and stated[key] != fields[key]
    ] + ([f"rope {there} there, {here} here"] if there != here else [])


def _scaling_of(fields: Tree) -> Tree:
    """What rotary frequencies are scaled by, defaults included, so that equal scalings are equal."""
    rope, longest = fields.get("rope", {}), fields.get("max_position_embeddings", 32_768)
    rope = rope if isinstance(rope, RopeConfig) else RopeConfig(**rope)
    effective = {"type": rope.type, **rope.resolved(longest).stated}
    return effective | ({"max_position_embeddings": longest} if rope.type == "dynamic" else {})
