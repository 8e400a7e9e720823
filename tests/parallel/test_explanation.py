"""``fsdmoe.explain``: a line for each kind of module, of real models of transformers and of fsdmoe."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import fsdmoe
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.models import build_model, preset_config
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf


def explained(family: str, recompute: tuple[Any, ...], **options: Any) -> list[str]:
    if family == "native":
        model: Any = build_model(preset_config("tiny-qwen3"))
    else:
        model = tiny_hf(family)
        if family != "gpt_oss":
            model.set_attn_implementation("sdpa")
    if family == "mixtral":
        model.model.layers[1].input_layernorm.forward = model.model.layers[1].input_layernorm.forward.__call__
    meshes = fsdmoe.build_meshes(ep=torch.distributed.get_world_size())
    policy = fsdmoe.ParallelPolicy(memory=MemoryConfig(recompute=recompute))
    return fsdmoe.explain(fsdmoe.parallelize(model, meshes, policy, **options)).splitlines()


@requires_transformers
def test_a_wrapped_model_says_what_computes_its_modules_and_what_is_left() -> None:
    lines, others = run_ranks(explained, 2, "qwen3_moe", ("norms", "attention"))
    assert lines == others
    norms = "kernels: norms; recomputed: norms"
    assert lines[:12] == [
        "computed by:",
        "  1 x the model (Qwen3MoeForCausalLM): loss in chunks, without logits",
        "  1 x model.embed_tokens (Embedding): kernels: embeddings",
        "  2 x model.layers.* (Qwen3MoeDecoderLayer): no cache; recomputed: attention, norms",
        "  2 x model.layers.*.self_attn (Qwen3MoeAttention): recomputed: attention",
        "  2 x model.layers.*.self_attn.q_proj (Linear): kernels: projections",
        "  2 x model.layers.*.self_attn.k_proj (Linear): kernels: projections",
        "  2 x model.layers.*.self_attn.v_proj (Linear): kernels: projections",
        "  2 x model.layers.*.self_attn.o_proj (Linear): kernels: projections",
        f"  2 x model.layers.*.self_attn.q_norm (Qwen3MoeRMSNorm): {norms}",
        f"  2 x model.layers.*.self_attn.k_norm (Qwen3MoeRMSNorm): {norms}",
        "  2 x model.layers.*.mlp.experts (Qwen3MoeExperts): grouped experts over ep 2, etp 1 (allgather), "
        "plain torch bfloat16",
    ]
    left = lines[lines.index("left as they are:") + 1 : lines.index("rewrites, from the inside out:")]
    assert left == [
        "  2 x model.layers.*.self_attn (Qwen3MoeAttention): rotary positions left to recomputed "
        "attention, attentions left to recomputed attention",
        "  1 x model.rotary_emb (Qwen3MoeRotaryEmbedding): no kernel of fsdmoe computes it",
        "  1 x lm_head (Linear): projections left to the loss",
    ]
    rules = lines[lines.index("rewrites, from the inside out:") + 1 :]
    used = ["ep", "a kernel", "the loss", "recompute", "recomputed attention", "no cache", "memory"]
    assert [line.strip().partition(":")[0] for line in rules] == used


@requires_transformers
def test_layers_that_differ_have_lines_of_their_own() -> None:
    (lines,) = run_ranks(explained, 1, "mixtral", ())
    name = "model.layers.*.input_layernorm (MixtralRMSNorm)"
    assert f"  1 x {name}: kernels: norms" in lines
    assert f"  1 x {name}: a forward of others" in lines
    assert f"  1 x {name}: norms left to a forward of others" in lines
    assert "  2 x model.layers.*.self_attn (MixtralAttention): kernels: rotary positions, attentions" in lines
    experts = (
        "model.layers.*.mlp.experts (MixtralExperts): grouped experts on this rank, plain torch bfloat16"
    )
    assert f"  2 x {experts}" in lines


@requires_transformers
def test_a_model_whose_layers_were_not_to_be_fused_says_so() -> None:
    lines = fsdmoe.explain(tiny_hf("mixtral")).splitlines()
    why = "fsdmoe.parallelize was not called, or with fused_layers = False"
    assert f"  2 x model.layers.*.self_attn.q_proj (Linear): {why}" in lines


def test_a_model_of_fsdmoe_is_explained_too() -> None:
    (lines,) = run_ranks(explained, 1, "native", ("norms", "experts"))
    (layer,) = [line for line in lines if "layers.* (" in line]
    assert layer.endswith("model.layers.* (DecoderLayer): recomputed: experts, norms")
    (experts,) = [line for line in lines if "(GroupedExperts)" in line]
    assert experts.endswith("grouped experts on this rank, plain torch bfloat16; recomputed: experts")
    (attention,) = [line for line in lines if "(GroupedQueryAttention)" in line]
    assert attention.endswith(": fsdmoe's own")
    assert lines[lines.index("left as they are:") + 1] == "rewrites, from the inside out:"


def kernels_of_experts(family: str, supported: bool) -> set[str]:
    """What is said of experts where there are kernels that take such shapes, or do not."""

    class Kernels:
        supports_shape = staticmethod(lambda *_: supported)

    with mock.patch("fsdmoe.parallel.explanation.triton_for", return_value=Kernels):
        lines = explained(family, ())
    return {name for name in ("Triton", "plain torch") for line in lines if f", {name} bfloat16" in line}


@requires_transformers
@pytest.mark.parametrize(
    ("family", "supported", "kernel"),
    [
        ("qwen3_moe", True, "Triton"),
        ("native", True, "Triton"),
        ("qwen3_moe", False, "plain torch"),
        ("gpt_oss", True, "plain torch"),  # whose weights lie otherwise
    ],
)
def test_kernels_of_experts_are_named_where_they_take_them(family: str, supported: bool, kernel: str) -> None:
    assert run_ranks(kernels_of_experts, 1, family, supported) == [{kernel}]
