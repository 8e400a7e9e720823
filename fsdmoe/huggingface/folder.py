"""A folder with a ``config.json`` (``model.hf``): its model, its sizes as a :class:`ModelConfig`, its limits.

transformers is an optional dependency, so :mod:`fsdmoe.huggingface.transformers_api` is imported when chosen.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdmoe.checkpoint.agree import from_first
from fsdmoe.checkpoint.catalog import resolve
from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.limits import attention_limits
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.models.config import Architecture, ModelConfig, gpt_oss_turns
from fsdmoe.precision.config import PrecisionConfig


def build_folder_model(folder: str, adapter: AdapterConfig | None = None) -> nn.Module:
    """The folder's causal language model, on the meta device, with adapters where they are on."""
    from fsdmoe.huggingface.transformers_api import build_hf_model  # optional: only when chosen

    model = build_hf_model(folder)
    if adapter is not None and adapter.is_on:
        from fsdmoe.huggingface.peft_api import add_adapters  # optional: only when chosen

        add_adapters(model, adapter, folder)
    return model


def hf_fields(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a :class:`ModelConfig` that config.json decides: for checks, plans and FLOPs."""
    from fsdmoe.huggingface.transformers_api import read_hf_config  # optional: only when chosen

    config = read_hf_config(folder)

    def first(*names: str, default: Any = None) -> Any:
        return next((v for n in names if (v := _read(config, n)) is not None), default)

    layers, heads = first("num_hidden_layers"), first("num_attention_heads")
    num_experts = first("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", default=0)
    top_k = first("num_experts_per_tok", "moe_topk", "top_k_experts", default=1)
    shared = first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    shared_width = first("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    width = first("moe_intermediate_size", "intermediate_size", default=1)
    if None in (layers, heads, first("vocab_size"), first("hidden_size")):
        raise ConfigError(
            f"model.hf: {os.fspath(folder)!r} describes a {config.model_type}, which is no causal language "
            "model of one stack of layers; wrap it yourself with fsdmoe.parallelize (docs/huggingface.md)"
        )
    fields: dict[str, Any] = {
        "architecture": _nearest(config.model_type, is_mla=first("kv_lora_rank") is not None),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": first("num_key_value_heads", default=heads),
        "head_dim": first("head_dim", default=config.hidden_size // heads),
        "intermediate_size": first("intermediate_size", default=1),
        "first_k_dense_replace": _num_dense_layers(config, layers) if num_experts else layers,
        "moe_intermediate_size": width,
        "num_experts": num_experts or 1,
        "num_experts_per_tok": top_k if num_experts else 1,
        "n_shared_experts": shared or shared_width // width,
        "tie_word_embeddings": bool(first("tie_word_embeddings", default=False)),
    }
    if config.model_type == "gpt_oss":
        kinds = config.layer_types
        fields["sliding_window"] = config.sliding_window
        fields["layer_types"] = None if kinds == gpt_oss_turns(layers) else tuple(kinds)
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if first(name) is not None:
            fields[name] = first(name)
    return fields


def require_weights(config: ModelConfig, precision: PrecisionConfig, *, resumes: bool) -> str | None:
    """``model.hf``, once it is sure that there are weights in it; None where they are to be new ones, or
    those of the checkpoint that a run ``resumes``, which has all but frozen weights that are kept as codes.
    Collective; before a model is built."""
    needs_none = config.random_weights or (resumes and precision.frozen_dtype is None)
    folder = None if needs_none else config.hf
    if folder is not None and not from_first(lambda: resolve(folder)[1]):
        raise ConfigError(
            f"model.hf: expected weights (*.safetensors) next to the config.json, got none in {folder!r}; "
            "download them too, or set model.random_weights = true to start from new ones"
        )
    return folder


def hf_limits(folder: str | os.PathLike[str], seq_len: int, fixes: Sequence[str]) -> list[str]:
    """Why rows of ``seq_len`` tokens cannot be split over ranks in the folder's model; empty where they
    can. ``fixes``: see :func:`attention_limits`."""
    from fsdmoe.huggingface.transformers_api import read_hf_config  # optional: only when chosen

    return attention_limits(read_hf_config(folder), seq_len, fixes)


def _read(config: Any, name: str) -> Any:
    """A key of a configuration, None where it has none; of one that says it by layer, that of the first."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to give one for all (Gemma-4's heads)
        return getattr(config.per_layer_config[0], name, None)


def _nearest(kind: str, *, is_mla: bool) -> Architecture:
    """The family of ours whose shapes are most like it."""
    if is_mla:
        return "deepseek_v3"
    return kind if kind in ("mixtral", "glm4_moe", "gpt_oss") else "qwen3_moe"  # type: ignore[return-value]


def _num_dense_layers(config: Any, num_layers: int) -> int:
    """Layers without experts, by what families call them."""

    def told(name: str, default: Any = None) -> Any:
        value = getattr(config, name, None)
        return default if value is None else value

    kinds = told("mlp_layer_types", told("layer_types", []))
    if any(kind in ("sparse", "moe", "hash_moe") for kind in kinds):
        return num_layers - sum(kind in ("sparse", "moe", "hash_moe") for kind in kinds)
    if (first := told("first_k_dense_replace", told("num_dense_layers"))) is not None:
        return int(first)
    if (chosen := told("moe_layers")) is not None:  # Llama-4
        return num_layers - len(chosen)
    if (period := told("expert_layer_period")) is not None:  # Jamba
        return sum(index % period != told("expert_layer_offset", 0) for index in range(num_layers))
    alone = told("mlp_only_layers", [])
    step = told("decoder_sparse_step", told("moe_layer_interval", 1))
    begin, end = told("moe_layer_start_index", 0), told("moe_layer_end_index", num_layers - 1)  # ERNIE
    inside = range(begin, (end if end >= 0 else num_layers - 1) + 1)
    return sum(
        index in alone or (index + 1) % step != 0 or index not in inside for index in range(num_layers)
    )
