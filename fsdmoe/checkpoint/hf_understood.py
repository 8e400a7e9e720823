"""What of a Hugging Face config.json the native decoder computes, key by key; everything else is refused.

A list of what is understood, not of what is not: a key that this version does not know may change what the
model computes, and a model that is computed otherwise than it was trained fails without an error.

==================  =========================================================================================
read                becomes a field of ``ModelConfig`` (:func:`fsdmoe.checkpoint.hf_config.model_fields`)
ignored             says nothing about what the model computes: names, token ids, dtypes, losses of training
checked             must have the value that the decoder computes with, e.g. ``sliding_window`` none
unknown             refused, unless its value is null
==================  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdmoe.checkpoint.hf_rope import read_rope
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.kernels.activations import GPT_OSS_ALPHA, GPT_OSS_LIMIT

# Read as they are, under the same name, and written so
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "tie_word_embeddings", "initializer_range", "num_experts_per_tok",
)  # fmt: skip
_SIGMOID = (
    "intermediate_size", "moe_intermediate_size", "first_k_dense_replace", "n_shared_experts", "n_group",
    "topk_group", "routed_scaling_factor", "norm_topk_prob", "num_nextn_predict_layers", "attention_bias",
)  # fmt: skip
DEEPSEEK = (
    *_SIGMOID, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
GLM = (*_SIGMOID, "head_dim", "use_qk_norm")
_READ = {
    *SHARED, "intermediate_size", "num_experts", "num_local_experts", "rope_theta", "max_position_embeddings",
}  # fmt: skip
_READ_BY = {
    "qwen3_moe": {"head_dim", "moe_intermediate_size", "norm_topk_prob", "attention_bias"},
    "mixtral": {"head_dim"},
    "deepseek_v3": {*DEEPSEEK, "n_routed_experts"},
    "glm4_moe": {*GLM, "n_routed_experts"},
    # The last two repeat others, in the released files; transformers passes over both.
    "gpt_oss": {
        "head_dim", "attention_bias", "sliding_window", "experts_per_token", "initial_context_length",
    },
}  # fmt: skip
_IGNORED = {
    # what and whose it is
    "architectures", "model_type", "transformers_version", "auto_map", "_name_or_path", "name_or_path",
    "_commit_hash", "tokenizer_class", "dtype", "torch_dtype", "unsloth_version", "unsloth_fixed",
    # tokens, and how long a text may be
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "max_window_layers", "max_length", "min_length",
    # how transformers runs it
    "use_cache", "return_dict", "return_dict_in_generate", "output_hidden_states", "output_attentions",
    "output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss", "ep_size", "pretraining_tp",
    "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "attn_implementation", "_experts_implementation", "_experts_implementation_internal",
    # judged together with others: sliding_window, widths of heads
    "use_sliding_window", "head_dim", "qk_head_dim",
    # losses, which are experts.balance here
    "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
    # other tasks, and generation, which transformers 4 kept here
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "do_sample",
    "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "prefix",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "router_jitter_noise": (0,),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True,),
    "mlp_bias": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
}
_NEUTRAL_BY: dict[str, dict[str, tuple[Any, ...]]] = {
    "mixtral": {"attention_bias": (False,), "norm_topk_prob": (True,)},
    "gpt_oss": {"swiglu_alpha": (GPT_OSS_ALPHA,), "swiglu_limit": (GPT_OSS_LIMIT,)},
}
FAMILIES = tuple(_READ_BY)


def not_understood(config: Tree) -> list[str]:
    """What the native decoder of this ``model_type`` would compute otherwise, a line a key."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        return [f"model_type: expected one of {', '.join(FAMILIES)}, got {kind!r}"]
    neutral = _NEUTRAL | _NEUTRAL_BY.get(kind, {})
    problems = []
    for key, value in config.items():
        if value is None or key in _IGNORED or key in _READ or key in _READ_BY[kind]:
            continue
        if key in _CHECKS:
            problems += [line for line in _CHECKS[key](config) if line not in problems]
        elif key not in neutral:
            problems.append(f"{key}: not known to the native decoder, got {_short(value)}")
        elif not any(value == allowed for allowed in neutral[key]):
            problems.append(f"{key}: expected {neutral[key][0]!r}, got {_short(value)}")
    return problems + _disagreements(config, kind)


def _rope(config: Tree) -> list[str]:
    found = read_rope(config)
    if found.partial not in (None, 1.0) and config.get("model_type") != "glm4_moe":
        return [*found.problems, f"partial_rotary_factor: expected 1, got {found.partial}"]
    return found.problems


def _window(config: Tree) -> list[str]:
    """A window that is off, or as wide as the longest text, hides nothing."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if window is None or config.get("use_sliding_window") is False:
        return []
    if isinstance(window, int) and isinstance(longest, int) and window >= longest:
        return []
    return [f"sliding_window: expected none, got {_short(window)}"]


def _layer_types(config: Tree) -> list[str]:
    kinds = set(config["layer_types"]) if isinstance(config["layer_types"], list) else {"?"}
    if config.get("model_type") == "gpt_oss":
        wanted = ("sliding_attention", "full_attention")
        return [] if kinds <= set(wanted) else [f"layer_types: expected {wanted}, got {sorted(kinds)}"]
    allowed = {"full_attention"} if _window(config) else {"full_attention", "sliding_attention"}
    return [] if kinds <= allowed else [f"layer_types: expected full_attention only, got {sorted(kinds)}"]


def _dense_layers(config: Tree) -> list[str]:
    """Only the first layers can be without experts."""
    layers = config["mlp_only_layers"]
    if isinstance(layers, list) and sorted(layers) == list(range(len(layers))):
        return []
    return [f"mlp_only_layers: expected the first layers [0, 1, …] or none, got {_short(layers)}"]


def _quantised(config: Tree) -> list[str]:
    stated = config["quantization_config"]
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if method in ("fp8", "compressed-tensors") or (
        method == "mxfp4" and config.get("model_type") == "gpt_oss"
    ):
        return []  # becomes ordinary numbers; what cannot is refused where the weights are opened
    return [f"quantization_config: expected none or fp8 with block scales, got {_short(stated)}"]


_CHECKS: dict[str, Callable[[Tree], list[str]]] = {
    "rope_scaling": _rope, "rope_parameters": _rope, "partial_rotary_factor": _rope,
    "sliding_window": _window, "layer_types": _layer_types,
    "mlp_only_layers": _dense_layers, "quantization_config": _quantised,
}  # fmt: skip


def _disagreements(config: Tree, kind: str) -> list[str]:
    """Keys that say the same thing must say it alike."""
    pairs = [("num_experts", "num_local_experts"), ("num_experts", "n_routed_experts"),
             ("num_experts_per_tok", "experts_per_token")]  # fmt: skip
    same = [(a, b, config[a], config[b]) for a, b in pairs if a in config and b in config]
    if kind == "deepseek_v3":
        rope = config.get("qk_rope_head_dim")
        same += [("num_key_value_heads", "num_attention_heads", config.get("num_key_value_heads"),
                  config.get("num_attention_heads")),
                 ("head_dim", "qk_rope_head_dim", config.get("head_dim"), rope),
                 ("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim", config.get("qk_head_dim"),
                  (config.get("qk_nope_head_dim") or 0) + (rope or 0))]  # fmt: skip
    return [
        f"{one}: expected the {there} of {other}, got {here}"
        for one, other, here, there in same
        if here is not None and there is not None and here != there
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
