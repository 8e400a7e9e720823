"""What transformers cannot hold of a native model is said by key."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from fsdmoe.checkpoint import hf_held
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.hf_export import _refuse_not_held
from fsdmoe.checkpoint.hf_held import not_held
from tests.support.hf_pairs import tiny


def test_each_line_names_its_key_and_what_to_do() -> None:
    fields = dataclasses.asdict(tiny("qwen3_moe", n_shared_experts=1, moe_latent_size=8))
    assert not_held(fields, has_bias=True, selection="expert_choice") == [
        "experts.balance.bias_rate: the routers of Qwen3MoeForCausalLM have no selection bias; choose an "
        "architecture that has one (deepseek_v3 or glm4_moe), or balance by experts.balance.global_batch or "
        "sequence",
        "experts.selection: in Qwen3MoeForCausalLM each token chooses its experts, got expert_choice; set it "
        "to top_k",
        "model.moe_latent_size: Qwen3MoeForCausalLM has nothing there, got 8; drop it",
        "model.n_shared_experts: Qwen3MoeForCausalLM has only 0 there, got 1; write 0, or choose another "
        "architecture",
    ]
    assert not_held(dataclasses.asdict(tiny("deepseek_v3")), has_bias=True) == []


def test_the_only_value_of_a_field_may_follow_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dataclasses.asdict(tiny("qwen3_moe"))
    width = fields["hidden_size"] // fields["num_attention_heads"]
    rule = {"head_dim": lambda given: given["hidden_size"] // given["num_attention_heads"]}
    monkeypatch.setitem(hf_held._ONLY, "qwen3_moe", rule)
    assert not_held(fields | {"head_dim": width}, has_bias=False) == []
    (line,) = not_held(fields | {"head_dim": width + 2}, has_bias=False)
    assert line.startswith(f"model.head_dim: Qwen3MoeForCausalLM has only {width} there, got {width + 2}")
    assert not_held({"architecture": "qwen3_moe"}, has_bias=False) == []


def test_a_wrapped_model_whose_experts_chose_is_not_exported_as_one_whose_tokens_choose() -> None:
    about = {"hf_config": {"architectures": ["MixtralForCausalLM"]}, "run": {"experts": {}}}
    index: Any = SimpleNamespace(about=about, tensors={})
    _refuse_not_held(index)
    about["run"] = {"experts": {"selection": "expert_choice"}}
    with pytest.raises(CheckpointError, match="in MixtralForCausalLM each token chooses its experts"):
        _refuse_not_held(index)
