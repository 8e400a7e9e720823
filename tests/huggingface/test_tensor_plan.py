"""What of a Hugging Face model can be split over tp, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_tensor
from fsdmoe.data import Batch
from fsdmoe.feed import Feed
from fsdmoe.huggingface.adapters import find_experts
from fsdmoe.huggingface.tensor_plan import plan_tensors
from fsdmoe.mesh import Axis, MeshConfig, build_meshes
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import parallelize
from fsdmoe.tensor_parallel.split import split_tensors
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.coordinates import At
from tests.support.hf_tiny import batch, tiny_hf

pytestmark = requires_transformers


HALVED: dict[str, dict[str, int]] = {
    "qwen2_moe": {"q_proj.weight": 0, "q_proj.bias": 0, "k_proj.weight": 0, "k_proj.bias": 0,
                  "v_proj.weight": 0, "v_proj.bias": 0, "o_proj.weight": 1},
    "glm4_moe": {"q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "o_proj.weight": 1,
                 "layers.0.mlp.gate_proj.weight": 0, "layers.0.mlp.up_proj.weight": 0,
                 "layers.0.mlp.down_proj.weight": 1},
    "deepseek_v2": {"q_b_proj.weight": 0, "kv_b_proj.weight": 0, "o_proj.weight": 1,
                    "layers.0.mlp.gate_proj.weight": 0, "layers.0.mlp.up_proj.weight": 0,
                    "layers.0.mlp.down_proj.weight": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", HALVED)
def test_heads_columns_and_vocabulary_are_cut_and_all_else_stays_whole(family: str) -> None:
    model = tiny_hf(family)
    before = {name: tuple(p.shape) for name, p in model.named_parameters()}
    plan_tensors(model, 2, find_experts(model))
    split_tensors(model, At({Axis.TP: 2}))
    cut = HALVED[family] | {"embed_tokens.weight": 0, "lm_head.weight": 0}
    for name, parameter in model.named_parameters():
        dim = next((dim for suffix, dim in cut.items() if name.endswith(suffix)), None)
        wanted = tuple(n // 2 if i == dim else n for i, n in enumerate(before[name]))
        assert tuple(parameter.shape) == before[name]
        assert tuple(local_tensor(parameter).shape) == wanted, name


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("olmoe", {}, r"layers\.0\.self_attn\.q_proj\.weight"),  # its norms see all heads at once
        ("gpt_oss", {}, r"self_attn\.sinks"),
        ("diffllama", {}, r"layers\.0\.self_attn\.lambda_k1"),  # pairs heads that stand far apart
        ("qwen3_moe", {"num_attention_heads": 6}, "mesh.tp: expected a divisor of 6 and 2 heads.* choose 2"),
        ("qwen3_moe", {"vocab_size": 63}, "63 tokens of the vocabulary, got 4; choose 1"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    model = tiny_hf(family, **changes)
    with pytest.raises(ConfigError, match=message):
        plan_tensors(model, 4, find_experts(model))


def test_a_model_that_is_not_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.tp: expected a causal language model of transformers"):
        plan_tensors(nn.Sequential(nn.Linear(4, 4)), 2, ())


def test_adapters_on_projections_are_refused() -> None:
    class Adapted(nn.Linear):
        pass

    model: Any = tiny_hf("llama")
    model.model.layers[1].mlp.up_proj = Adapted(16, 24, bias=False)
    with pytest.raises(ConfigError, match=r"mesh\.tp: .*layers\.1\.mlp\.gate_proj\.weight"):
        plan_tensors(model, 2, find_experts(model))


def initial_weights(tp: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = tiny_hf("qwen3_moe", randomized=False, mlp_only_layers=[0])
    model = parallelize(model, build_meshes(tp=tp))
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def test_initial_weights_do_not_depend_on_the_split() -> None:
    one, two = run_ranks(initial_weights, 1, 1)[0], run_ranks(initial_weights, 2, 2)[0]
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def call_without_a_plan() -> str:
    model = parallelize(tiny_hf("llama"), build_meshes(tp=2))
    with pytest.raises(ConfigError) as caught:
        model(batch(0, 0))
    return str(caught.value)


def test_a_split_model_called_without_a_plan_says_how_to_call_it() -> None:
    for message in run_ranks(call_without_a_plan, 2):
        assert "attention_plan: expected an AttentionPlan" in message
        assert "fsdmoe.as_causal_lm" in message


def rows_of_sinks() -> str:
    meshes = build_meshes(MeshConfig(cp=2))
    decoder = as_causal_lm(parallelize(tiny_hf("gpt_oss", sliding_window=64), meshes))
    tokens = batch(0, 0)
    rows = Batch(tokens, tokens, torch.arange(8)[None], torch.zeros_like(tokens), tokens >= 0)
    feed = Feed(meshes, ContextParallelConfig())
    with pytest.raises(ConfigError) as caught:
        decoder(**feed.inputs(feed.prepare([rows]))[0])
    return str(caught.value)


def test_attention_sinks_are_refused_before_rows_are_split() -> None:
    for message in run_ranks(rows_of_sinks, 2):
        assert "mesh.cp: expected attention without sinks, got gpt_oss" in message
