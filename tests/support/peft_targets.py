"""The rows of the table of :mod:`tests.support.peft_table`: every way in which peft can target a module."""

from __future__ import annotations

from typing import Any

from tests.support.lora_case import EXPERTS
from tests.support.peft_table import ATTENTION, Target


def _lora(*modules: str, **settings: Any) -> dict[str, Any]:
    return {"target_modules": list(modules), **settings}


_HEAD = {"modules_to_save": ["lm_head"]}
_GPT2 = ("c_attn", "c_proj", "c_fc")

TARGETS: dict[str, Target] = {
    # by module
    "attention": Target(_lora(*ATTENTION)),
    "all linear layers": Target({"target_modules": "all-linear"}, family="deepseek_v3"),
    "all linear layers and experts": Target({"target_modules": "all-linear"}),
    "by a pattern": Target({"target_modules": r".*layers\.1\.self_attn\.(q|v)_proj"}),
    "ranks by pattern": Target(
        _lora(*ATTENTION, rank_pattern={"q_proj": 5}, alpha_pattern={"o_proj": 9}, exclude_modules=["k_proj"])
    ),
    "one layer": Target(_lora(*ATTENTION, layers_to_transform=[1])),
    "embedding": Target(_lora("embed_tokens")),
    "embedding and attention": Target(_lora("embed_tokens", *ATTENTION)),
    "embedding, tied": Target(_lora("embed_tokens", "q_proj"), changes={"tie_word_embeddings": True}),
    "Conv1D": Target(_lora(*_GPT2), family="gpt2"),
    "square Conv1D": Target({"target_modules": r".*attn\.c_proj"}, family="gpt2"),
    "Conv1D and embedding": Target(_lora("c_proj", "wte"), family="gpt2"),
    "head": Target(_lora("lm_head")),
    "head and attention": Target(_lora("lm_head", *ATTENTION)),
    "head, tied": Target(_lora("lm_head", "q_proj"), changes={"tie_word_embeddings": True}),
    "linear layer of a router": Target(  # how such a family is exported is another table's
        _lora("router.layer", "q_proj"), family="granite_shared", skips=("to_hf",)
    ),
    "gate of a shared expert": Target(_lora("shared_expert_gate", "q_proj"), family="qwen2_moe"),
    # by parameter
    "experts": Target({"target_modules": [], "target_parameters": list(EXPERTS)}),
    "experts and attention": Target(_lora(*ATTENTION, target_parameters=list(EXPERTS))),
    "one weight of experts": Target({"target_modules": [], "target_parameters": [EXPERTS[1]]}),
    "transposed experts": Target(
        {"target_modules": [], "target_parameters": list(EXPERTS)}, family="gpt_oss"
    ),
    "router": Target(_lora("q_proj", target_parameters=["mlp.gate.weight"])),
    "projection by parameter": Target({"target_modules": [], "target_parameters": ["q_proj.weight"]}),
    # kinds of LoRA
    "rsLoRA": Target(_lora(*ATTENTION, "embed_tokens", target_parameters=list(EXPERTS), use_rslora=True)),
    "DoRA": Target(_lora(*ATTENTION, use_dora=True)),
    "DoRA of an embedding": Target(_lora("embed_tokens", use_dora=True)),
    "DoRA of Conv1D": Target(_lora(*_GPT2, use_dora=True), family="gpt2"),
    "DoRA of the head": Target(_lora("lm_head", use_dora=True)),
    "PiSSA": Target(_lora(*ATTENTION, init_lora_weights="pissa")),
    "biases of adapted layers": Target(_lora(*ATTENTION, bias="lora_only"), changes={"attention_bias": True}),
    "all biases": Target(_lora(*ATTENTION, bias="all"), changes={"attention_bias": True}),
    "a bias of B": Target(_lora("q_proj", lora_bias=True), changes={"attention_bias": True}),
    "a bias of B without one of the layer": Target(  # peft merges half of it before it refuses
        _lora("q_proj", lora_bias=True),
        skips=("merge", "disable merged", "unmerge", "merge and unload", "to_hf"),
    ),
    # whole modules
    "head to save": Target(_lora("q_proj", modules_to_save=["lm_head"])),
    "router to save": Target(_lora("q_proj", modules_to_save=["mlp.gate"])),
    "norm to save": Target(_lora("q_proj", modules_to_save=["norm"])),
    "norms of layers to save": Target(_lora("q_proj", modules_to_save=["input_layernorm", "q_norm"])),
    "embedding to save": Target(_lora("q_proj", modules_to_save=["embed_tokens"])),
    "embedding adapted, head to save": Target(_lora("embed_tokens", modules_to_save=["lm_head"])),
    "experts to save": Target(_lora("q_proj", modules_to_save=["experts"])),
    "attention to save": Target(_lora("lm_head", modules_to_save=["self_attn"])),
    "projection to save": Target(_lora("q_proj", modules_to_save=["v_proj"])),
    # several
    "two adapters, one active": Target(
        _lora(*ATTENTION, "embed_tokens"), further=(_lora("q_proj", r=5),), active=("second",)
    ),
    "two adapters together": Target(
        _lora(*ATTENTION, target_parameters=list(EXPERTS)),
        further=(_lora("q_proj", "embed_tokens", target_parameters=list(EXPERTS)),),
        active=("default", "second"),
    ),
    "two adapters with modules to save": Target(
        _lora("q_proj", **_HEAD), further=(_lora("q_proj", **_HEAD),), active=("second",)
    ),
    "two DoRA adapters together": Target(
        _lora("q_proj", use_dora=True),
        further=(_lora("q_proj", "v_proj", use_dora=True),),
        active=("default", "second"),
        skips=("merge", "disable merged", "unmerge", "merge and unload", "to_hf"),
    ),
    # tied by peft
    "embedding to save, tied by peft": Target(
        _lora("q_proj", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        changes={"tie_word_embeddings": True},
    ),
    "embedding, tied by peft": Target(
        _lora("embed_tokens", "q_proj", ensure_weight_tying=True), changes={"tie_word_embeddings": True}
    ),
    "layers used twice": Target(  # whether an export has all names is another table's
        _lora("q_proj", layer_replication=[(0, 2), (1, 2)]), family="llama", skips=("to_hf",)
    ),
    # variants of LoRA
    "aLoRA": Target(_lora(*ATTENTION, alora_invocation_tokens=[1, 2])),
    "MiCA": Target(_lora(*ATTENTION, init_lora_weights="mica")),
    # tokens
    "some tokens": Target(_lora("q_proj", trainable_token_indices=[1, 5])),
}
