"""Adapters by peft around attention and fused experts: how they are split, and what they compute then."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import fsdmoe
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_slice
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.huggingface.adapters import find_experts
from fsdmoe.huggingface.lora import ExpertAdapters, peel
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.lora_routers import connect_other_parameters
from fsdmoe.mesh import Axis
from fsdmoe.optim import AdamW
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.coordinates import At, use_local_tensors
from tests.support.hf_tiny import tiny_hf
from tests.support.lora_case import adapted, alone, differences, wrapped

pytestmark = requires_peft


def test_all_linear_means_to_a_run_what_it_means_to_peft() -> None:
    import peft

    from fsdmoe.huggingface.peft_api import add_adapters

    plain = peft.get_peft_model(tiny_hf("qwen3_moe"), peft.LoraConfig(r=2, target_modules="all-linear"))
    ours = tiny_hf("qwen3_moe")
    add_adapters(ours, AdapterConfig(rank=2, target_modules=("all-linear",)), "folder")
    expected = {name: p.shape for name, p in peel(plain).named_parameters() if p.requires_grad}
    assert {name: p.shape for name, p in ours.named_parameters() if p.requires_grad} == expected
    with pytest.raises(
        ConfigError, match="'wrong', which fits none; choose one of q_proj, k_proj, v_proj, o_pr"
    ):
        add_adapters(tiny_hf("qwen3_moe"), AdapterConfig(rank=2, target_modules=("wrong",)), "folder")


def product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    assert a is not None
    assert b is not None
    return b @ a


@pytest.mark.parametrize(
    ("family", "is_transposed"),  # what the module tells peft of itself
    [
        ("qwen3_moe", False),
        ("gpt_oss", True),  # transposed and interleaved
        pytest.param("qwen3_moe", True, marks=pytest.mark.full),
        pytest.param("gpt_oss", False, marks=pytest.mark.full),
    ],
)
def test_every_part_of_the_factors_makes_the_part_of_the_product_that_the_weight_has(
    family: str, is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts_class = type(next(iter(_experts(tiny_hf(family)))))
    monkeypatch.setattr(experts_class, "is_transposed", is_transposed, raising=False)
    model = peel(adapted(family))
    name, spec = next(iter(find_experts(model).items()))
    outer: Any = model.get_submodule(name.removesuffix(".base_layer.base_layer"))
    deltas = {w.parameter_name: w.get_delta_weight("default").detach() for w in (outer, outer.base_layer)}
    for ep, etp in itertools.product(range(2), range(2)):
        at = At({Axis.EP: 2, Axis.ETP: 2}, {Axis.EP: ep, Axis.ETP: etp})
        part = copy.deepcopy(model)
        adapters = ExpertAdapters(part, name, spec)
        adapters.split(at)
        use_local_tensors(part)
        updates = adapters.updates(adapters.active(), torch.float32)
        holder = torch.nn.Module()
        for own, placement in spec.placements().items():
            whole = deltas.get(own, torch.zeros(placement.global_shape))
            holder.register_parameter(own, torch.nn.Parameter(local_slice(whole, placement, at)))
        expected = spec.kernel_weights(holder)
        torch.testing.assert_close(product(updates.gate_up_a, updates.gate_up_b), expected.gate_up_E2ND)
        torch.testing.assert_close(product(updates.down_a, updates.down_b), expected.down_EDN)


def _experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [model.get_submodule(name) for name in find_experts(model)]


def test_only_adapters_that_are_switched_on_compute() -> None:
    model = adapted("qwen3_moe")
    name, spec = next(iter(find_experts(model).items()))
    adapters = ExpertAdapters(model, name, spec)
    assert adapters.active() == {spec.gate_up: ["default"], spec.down: ["default"]}
    with model.disable_adapter():
        assert adapters.active() == {}
    model.merge_adapter()
    assert adapters.active() == {}


def test_an_adapter_on_a_bias_of_experts_is_refused() -> None:
    model = adapted("gpt_oss", target_parameters=["mlp.experts.gate_up_proj_bias"])
    name, spec = next(iter(find_experts(model).items()))
    with pytest.raises(ConfigError, match=r"expected gate_up_proj and down_proj of .*gate_up_proj_bias"):
        ExpertAdapters(model, name, spec)


def _clones_of_adapted_experts() -> str:
    model = adapted("qwen3_moe")
    policy = fsdmoe.ParallelPolicy(experts=ExpertsConfig(clones=1))
    with pytest.raises(ConfigError) as caught:
        fsdmoe.parallelize(model, fsdmoe.build_meshes(), policy)
    return str(caught.value)


def test_clones_of_experts_that_peft_adapted_are_refused_by_the_table() -> None:
    (said,) = run_ranks(_clones_of_adapted_experts, 1)
    assert said.startswith(
        "experts.clones: clones are made of weights alone, got adapter.target_parameters = "
    )


def test_an_adapter_by_parameter_on_anything_but_experts_and_routers_is_refused() -> None:
    model = adapted("qwen3_moe", target_modules=[], target_parameters=["q_proj.weight"])
    with pytest.raises(
        ConfigError, match=r"expected weights of fused experts or routers, got weight of .*q_proj"
    ):
        connect_other_parameters(model, find_experts(model))


def test_adapters_on_attention_and_experts_train_under_ep_as_peft_does_alone() -> None:
    expected = alone("qwen3_moe", "lora", "sgd", 2)
    got = run_ranks(wrapped, 2, "qwen3_moe", "lora", "sgd", 2, {"ep": 2})[0]
    assert max(differences(expected, got).values()) <= 1e-5


def decay_by_name() -> None:
    """No gradients, a learning rate of 1: what is decayed becomes half of itself."""
    model: Any = adapted("qwen3_moe")
    fsdmoe.parallelize(model, fsdmoe.build_meshes())
    wanted = {name for name, p in model.named_parameters() if p.requires_grad and "layers.0." in name}
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = AdamW(model, lr=1.0, weight_decay=0.5, decays=lambda name, _: name in wanted)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0 if parameter.requires_grad else None
    optimizer.step()
    for name, value in before.items():
        found = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(found, value * (0.5 if name in wanted else 1.0), msg=name)


def test_a_decay_rule_sees_the_names_of_the_model_with_its_shell() -> None:
    run_ranks(decay_by_name, 1)
