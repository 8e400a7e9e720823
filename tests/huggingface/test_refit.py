"""Weights for an inference engine: FP8 in DeepSeek's layout, which import reads back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.checkpoint.quantised import dequantise
from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.refit import iterate_weights
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf

pytestmark = requires_transformers
CHANGES = {"hidden_size": 160, "moe_intermediate_size": 12}


def in_fp8() -> tuple[dict[str, Tensor], int, str]:
    model = parallelize(tiny_hf("qwen3_moe", **CHANGES), build_meshes(ep=2))
    found, most = {}, 0
    for bucket in iterate_weights(model, dtype="fp8_blocks", bucket_bytes=1 << 15):
        most = max(most, sum(value.nbytes for value in bucket.values()) if len(bucket) > 2 else 0)
        found |= bucket
    with pytest.raises(ConfigError) as caught:
        next(iterate_weights(model, dtype="fp8_blocks", names="memory"))
    return (
        {name: value.float() if "float8" in str(value.dtype) else value for name, value in found.items()},
        most,
        str(caught.value),
    )


def test_projections_are_fp8_with_a_scale_a_block_and_the_rest_is_bfloat16() -> None:
    found, most, message = run_ranks(in_fp8, 2)[0]
    assert 0 < most <= 1 << 15
    assert "expected names = 'disk' for fp8_blocks" in message
    plain = tiny_hf("qwen3_moe", **CHANGES).state_dict()
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert found[f"{name}_scale_inv"].shape == (2, 1), "160 rows are two blocks of 128"
    meant = dequantise(found[name], found[f"{name}_scale_inv"], (128, 128), torch.float32)
    wanted = plain["model.layers.1.mlp.experts.down_proj"][5]
    # Three bits of mantissa: half a step is a sixteenth, and steps end at 2^-9 of the block's largest / 448.
    assert ((meant - wanted).abs() <= wanted.abs() / 16 + wanted.abs().max() / 448 / 1024).all()
    scaled = {n.removesuffix("_scale_inv") for n in found if n.endswith("_scale_inv")}
    assert all(n.endswith("_proj.weight") for n in scaled)
    assert "model.layers.0.self_attn.q_proj.weight" in scaled
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert torch.equal(found[kept], plain[kept].bfloat16())


def sent_head() -> dict[str, tuple[Tensor, Tensor]]:
    """A model whose configuration ties two weights that differ here, as after an adapter's head is merged."""
    model = tiny_hf("qwen2_moe")
    model.config.tie_word_embeddings = True  # type: ignore[union-attr]
    own = {name: value.clone() for name, value in model.state_dict().items()}
    found = {
        name: value
        for bucket in iterate_weights(parallelize(model, build_meshes()))
        for name, value in bucket.items()
    }
    return {name: (found[name], own[name]) for name in ("lm_head.weight", "model.embed_tokens.weight")}


def test_a_head_of_its_own_is_sent_whatever_the_configuration_says() -> None:
    for found, wanted in run_ranks(sent_head, 1)[0].values():
        assert torch.equal(found, wanted)
