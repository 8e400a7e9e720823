"""Rotary positions of every kind of scaling equal transformers', beyond the length that a model was trained
on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdmoe.models import ModelConfig, preset_config
from fsdmoe.models.rope_config import RopeConfig
from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import hf_model, in_native_names, native_model, tiny

pytestmark = requires_transformers

# As released; the widths of the models are not.
DEEPSEEK_V3 = {
    "max_position_embeddings": 163_840, "rope_theta": 10_000.0,
    "rope": RopeConfig(
        type="yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    ),
}  # fmt: skip
QWEN3 = {
    "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "head_dim": 128,
    "rope": RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=32_768),
}  # fmt: skip
_PAIRS = 16
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "DeepSeek-V3 as released": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        4 * 4096,
    ),
    "Qwen3 as released": ("qwen3_moe", QWEN3, 4 * 32_768),
    "gpt-oss as released": (
        "gpt_oss",
        {"rope": preset_config("gpt-oss-20b").rope, "rope_theta": 150_000.0,
         "max_position_embeddings": 131_072},
        4 * 4096,
    ),
    "yarn with an attention factor": (
        "mixtral",
        {"rope": RopeConfig(type="yarn", factor=8.0, attention_factor=1.7, beta_fast=16.0, truncate=False,
                            original_max_position_embeddings=64)},
        256,
    ),
    "yarn with two mscales": (
        "deepseek_v3",
        {"rope": RopeConfig(type="yarn", factor=8.0, mscale=0.7, mscale_all_dim=1.3,
                            original_max_position_embeddings=64)},
        256,
    ),
    "llama3": (
        "qwen3_moe",
        {"rope": RopeConfig(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                            original_max_position_embeddings=8192), "rope_theta": 500_000.0},
        4 * 8192,
    ),
    "linear": ("mixtral", {"rope": RopeConfig(type="linear", factor=4.0)}, 4 * 32_768),
    "linear on half of each head": ("glm4_moe", {"rope": RopeConfig(type="linear", factor=4.0)}, 4 * 32_768),
    "dynamic": (
        "qwen3_moe", {"rope": RopeConfig(type="dynamic", factor=2.0), "max_position_embeddings": 64}, 256,
    ),
    "dynamic within the trained length": (
        "qwen3_moe", {"rope": RopeConfig(type="dynamic", factor=2.0), "max_position_embeddings": 512}, 256,
    ),
    **{
        f"longrope, {kind} texts": (
            "mixtral",
            {"max_position_embeddings": 16_384,
             "rope": RopeConfig(type="longrope", original_max_position_embeddings=4096,
                                short_factor=tuple(1 + 0.1 * i for i in range(_PAIRS)),
                                long_factor=tuple(1.5 + i for i in range(_PAIRS)))},
            length,
        )
        for kind, length in (("long", 4 * 4096), ("short", 4096))
    },
    "longrope of a model for shorter texts": (
        "mixtral",
        {"max_position_embeddings": 48,
         "rope": RopeConfig(type="longrope", original_max_position_embeddings=64,
                            short_factor=(1.1,) * _PAIRS, long_factor=(2.0,) * _PAIRS)},
        256,
    ),
}  # fmt: skip


def config_of(family: str, changes: dict[str, Any]) -> ModelConfig:
    return tiny(family, **({"head_dim": 2 * _PAIRS, "qk_rope_head_dim": 2 * _PAIRS} | changes))


@pytest.mark.parametrize(("family", "changes", "length"), CASES.values(), ids=CASES)
def test_logits_and_gradients_equal_transformers_up_to_the_last_position(
    family: str, changes: dict[str, Any], length: int
) -> None:
    """Some tokens at the begin of a text, some at its end."""
    config = config_of(family, changes)
    theirs = hf_model(config, std=0.2)
    ours = native_model(config, theirs)
    tokens = torch.randint(config.vocab_size, (1, 24))
    positions = torch.cat((torch.arange(8), torch.arange(length - 16, length)))[None]
    wanted = theirs(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    found = ours(tokens, positions_BS=positions).logits_BSV
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    for logits in (found, wanted):
        (logits.float() ** 2).mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    if family == "gpt_oss":
        gradients = in_native_names(gradients)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() <= 2e-5 * gradients[name].abs().max(), name


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_packed_document_gets_the_frequencies_of_its_own_length(kind: str) -> None:
    lists = {"short_factor": (1.0,) * 4, "long_factor": (2.0, 3.0, 4.0, 5.0)}
    own = {"original_max_position_embeddings": 16, **lists} if kind == "longrope" else {"factor": 4.0}
    config = tiny("qwen3_moe", max_position_embeddings=16, rope=RopeConfig(type=kind, **own))  # type: ignore[arg-type]
    ours = native_model(config, hf_model(config))
    first, second = torch.randint(config.vocab_size, (1, 20)), torch.randint(config.vocab_size, (1, 12))
    positions = torch.cat((torch.arange(20), torch.arange(12)))[None]
    documents = torch.tensor([0] * 20 + [1] * 12)[None]
    packed = ours(torch.cat((first, second), 1), positions_BS=positions, document_ids_BS=documents).logits_BSV
    alone = torch.cat((ours(first).logits_BSV, ours(second).logits_BSV), 1)
    assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max()
    unscaled = native_model(tiny("qwen3_moe"), hf_model(config))(first).logits_BSV
    assert (alone[:, :20] - unscaled).abs().max() > 1e-3 * alone.abs().max()
