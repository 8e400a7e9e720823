"""What a token costs, against FLOPs that torch counts in the model itself.

Rows of one token: attention then has no pairs that a mask leaves out, which torch would count.
"""

import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fsdmoe.huggingface.folder import build_folder_model, hf_fields
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.models.config import ModelConfig, preset_config
from fsdmoe.models.decoder import build_model
from fsdmoe.models.flops import attention_flops, training_flops_per_token
from fsdmoe.optim import freeze
from fsdmoe.optim.group_config import GroupConfig
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.parallel.token_cost import TokenCost, token_cost
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, requires_transformers, run_ranks
from tests.support.moe_families import tiny_model

FP32 = ParallelPolicy(precision=PrecisionConfig(param_dtype="float32"))


def counted(model: Any, *, backward: bool = False) -> float:
    """By torch, of one token; its embedding has a gradient, as if there were layers below. Rotary angles are
    products in some versions of transformers, and are of no token."""
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    x_11D = model.get_input_embeddings()(torch.tensor([[3]])).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        logits = model(inputs_embeds=x_11D, use_cache=False).logits
        if backward:
            logits.sum().backward()
    angles = [ops for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(sum(ops.values()) for ops in angles)


def folder_config(model: Any) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return ModelConfig(hf=folder, **hf_fields(folder))


def cost_in_parallel(family: str, mesh: MeshConfig, seq_len: int, changes: dict[str, Any]) -> TokenCost:
    model = tiny_model(family, **changes)
    return token_cost(parallelize(model, build_meshes(mesh), FP32), folder_config(model), seq_len)


def cost(family: str, seq_len: int = 1, num_ranks: int = 1, *, ep: int = 1, **changes: Any) -> TokenCost:
    return run_ranks(cost_in_parallel, num_ranks, family, MeshConfig(ep=ep), seq_len, changes)[0]


@requires_transformers
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "ernie4_5_moe", "granitemoeshared", "aria_text", "dbrx", "afmoe"]
)
def test_forward_flops_of_a_wrapped_model_are_those_of_its_modules(family: str) -> None:
    model = tiny_model(family)
    if not any("gate_up_proj" in name for name, _ in model.named_parameters()) and family == "aria_text":
        pytest.skip("experts of a form that counts whole, before transformers 5.22")
    assert cost(family).forward_flops == counted(model)


@requires_transformers
def test_layers_that_keep_a_state_count_their_matrices_and_experts_of_every_second_layer() -> None:
    model = tiny_model("jamba")
    found = cost("jamba")
    assert found.forward_flops == pytest.approx(counted(model), rel=0.05)  # the scan is no matrix
    idle = 6 * 3 * 32 * 24  # of eight experts of one layer
    assert found.active_params == sum(p.numel() for p in model.parameters()) - idle
    assert folder_config(model).num_moe_layers == 1


@requires_transformers
def test_attention_counts_where_a_layer_has_scores_and_within_its_window() -> None:
    longer = {kind: cost(kind, 512).forward_flops - cost(kind).forward_flops for kind in ("jamba", "afmoe")}
    shape = folder_config(tiny_model("afmoe"))
    first, *rest = (attention_flops(shape, 512, window) for window in (None, 6))
    one = attention_flops(shape, 1, None)
    assert longer == {"jamba": first - one, "afmoe": first + rest[0] - 2 * one}


@requires_transformers
def test_a_token_costs_the_same_where_experts_are_split() -> None:
    assert cost("ernie4_5_moe", num_ranks=2, ep=2) == cost("ernie4_5_moe")


def adapted() -> Any:
    model = tiny_model("qwen3_moe")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = build_folder_model(folder, AdapterConfig(rank=4, target_parameters=()))
    return found.to_empty(device="cpu").train()


def cost_of_adapted() -> TokenCost:
    model = adapted()
    return token_cost(parallelize(model, build_meshes(MeshConfig()), FP32), folder_config(model), 1)


@requires_peft
def test_frozen_weights_have_no_gradients_to_compute() -> None:
    model, found = adapted(), run_ranks(cost_of_adapted, 1)[0]
    assert found.training_flops == counted(model, backward=True)
    planned = training_flops_per_token(folder_config(model), 1, frozen=True)
    factors = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert found.training_flops == planned + 3 * 2 * factors


def test_frozen_layers_of_a_decoder_cost_two_thirds_of_their_training() -> None:
    config = preset_config("quickstart", num_hidden_layers=2, tie_word_embeddings=True)
    model = build_model(config)
    whole = training_flops_per_token(config, 64)
    assert token_cost(model, config, 64).training_flops == whole
    freeze(model, [GroupConfig(params=("model.layers.0.*",), frozen=True)])
    rest = build_model(replace(config, num_hidden_layers=1))
    layer = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in rest.parameters())
    norms, idle = 2 * 256 + 2 * 64, 6 * 3 * 256 * 384
    assert token_cost(model, config, 64).training_flops == whole - 2 * (layer - norms - idle)
