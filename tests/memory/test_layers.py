"""What each name frees, counted: the bytes that autograd keeps fall by what docs/memory.md says."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from fsdmoe.kernels import rms_norm
from fsdmoe.memory.config import Activation, MemoryConfig, Part
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.offload import build_offload
from fsdmoe.models import Decoder, ModelConfig, preset_config
from fsdmoe.models.memory_parts import prepare_parts
from tests.support.lean_norm import LeanNorm
from tests.support.saved_activations import saved_activations

TOKENS = 2 * 24


def config_of(family: str) -> ModelConfig:
    config = preset_config(f"tiny-{family}")
    if not config.is_mla:
        return config
    return replace(config, v_head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim)


def kept(config: ModelConfig, *parts: Part) -> int:
    return measured(config, MemoryConfig(recompute=parts))[0]


def measured(config: ModelConfig, memory: MemoryConfig) -> tuple[int, int]:
    """Bytes that stay, and bytes that left."""
    torch.manual_seed(0)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
    layers = [*model.model.layers, *model.model.mtp_layers]
    prepare_parts(layers, memory)
    offload = build_offload(memory, len(layers), torch.device("cpu"))
    keep_less(layers, memory, offload)
    tokens = torch.randint(0, 50, (2, TOKENS // 2))
    found = saved_activations(lambda: model(tokens, labels_BS=tokens).loss, model)
    return found, 0 if offload is None else offload.figures.bytes_moved


def freed(config: ModelConfig, name: Part) -> int:
    """Elements a token, by the formula; numbers of four bytes."""
    c = config
    num_layers = c.num_hidden_layers + c.num_nextn_predict_layers
    num_dense = c.first_k_dense_replace
    num_moe, num_mtp = num_layers - num_dense, c.num_nextn_predict_layers
    heads, queries, keys = c.num_attention_heads, 0, 0
    if not c.is_mla:
        queries, keys = heads * c.head_dim, c.num_key_value_heads * c.head_dim
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    query_rank, rank = c.q_lora_rank or 0, c.kv_lora_rank
    shared = num_moe * c.n_shared_experts * c.moe_intermediate_size + num_dense * c.intermediate_size
    if name == "norms":
        inside = query_rank + rank if c.is_mla else (queries + keys) * c.has_qk_norm
        return num_layers * (2 * c.hidden_size + inside) + num_mtp * 2 * c.hidden_size
    if name == "attention_projections":
        latents = 2 * query_rank + 2 * rank + c.qk_rope_head_dim
        plain = (queries + keys) * (1 + c.has_qk_norm) + keys
        return num_layers * (latents if c.is_mla else plain)
    if name == "mla_up":
        return num_layers * heads * (2 * qk + c.qk_nope_head_dim + c.v_head_dim)
    if name == "attention":
        return num_layers * heads * (1 + (c.v_head_dim if c.is_mla else c.head_dim))
    if name == "router":
        return num_moe * c.num_experts
    if name == "shared_experts":
        return 4 * shared
    if name == "activation":
        return 2 * shared
    assert name == "experts"
    return num_moe * 2 * c.num_experts_per_tok * c.moe_intermediate_size


NAMES: dict[str, tuple[Part, ...]] = {
    "qwen3": ("norms", "attention_projections", "router", "experts", "attention", "activation"),
    "mixtral": ("norms", "attention_projections", "router", "experts", "attention"),
    "deepseek-v3": (
        "norms", "attention_projections", "mla_up", "router", "shared_experts", "activation", "experts",
        "attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
def test_every_name_frees_what_its_formula_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "rms_norm_reference", LeanNorm.apply)
    config = config_of(family)
    everything = kept(config)
    for name in NAMES[family]:
        assert everything - kept(config, name) == 4 * TOKENS * freed(config, name), name


def test_a_layer_keeps_its_input_alone() -> None:
    config = config_of("mixtral")
    one_less = replace(config, num_hidden_layers=config.num_hidden_layers - 1)
    inputs = kept(config, "layer") - kept(one_less, "layer")
    assert inputs == 4 * TOKENS * config.hidden_size


def leaving(config: ModelConfig, name: Activation) -> int:
    """Elements a token and layer. What is below a kibibyte (log-sum-exp, routing weights) stays."""
    c = config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "qkv": 2 * (queries + keys) + keys,  # of two, one is in front of the norms
        "attention_output": queries,
        "expert_pre_activation": 2 * c.num_experts_per_tok * c.moe_intermediate_size,
    }.get(name, c.hidden_size)


@pytest.mark.parametrize("name", get_args(Activation))
def test_what_is_offloaded_leaves_and_is_not_kept(name: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "rms_norm_reference", LeanNorm.apply)
    config = config_of("qwen3")
    nbytes = 4 * TOKENS * leaving(config, name) * (config.num_hidden_layers - 1)  # the last keeps its own
    stay, left = measured(config, MemoryConfig(offload=(name,)))
    assert left == nbytes
    assert kept(config) - stay == nbytes
