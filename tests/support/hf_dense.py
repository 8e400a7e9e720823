"""Tiny dense models of transformers, for upcycling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def dense(kind: str, folder: Path, **changes: Any) -> nn.Module:
    """A tiny dense model of transformers, with its folder."""
    import transformers

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3, **changes,
    }  # fmt: skip
    config, model = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }[kind]
    made = model(config(**sizes))
    made.save_pretrained(folder)
    return made.eval()
