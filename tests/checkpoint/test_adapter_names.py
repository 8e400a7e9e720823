"""Checkpoints name the weights of a model alike with and without adapters."""

import pytest

from fsdmoe.checkpoint.adapter_names import exported_name, is_adapter_name, stored_name

LAYER = "model.layers.0"
INNER = f"{LAYER}.mlp.experts.base_layer"
NAMES = [
    (f"base_model.model.{INNER}.base_layer.down_proj", f"{LAYER}.mlp.experts.down_proj"),
    (f"{LAYER}.self_attn.q_proj.base_layer.weight", f"{LAYER}.self_attn.q_proj.weight"),
    (f"base_model.model.{LAYER}.input_layernorm.weight", f"{LAYER}.input_layernorm.weight"),
    (f"base_model.model.{INNER}.lora_A.default.weight", f"{INNER}.lora_A.default.weight"),
    (f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.q_proj.weight"),
    ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
    ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.modules_to_save.default.weight"),
]


@pytest.mark.parametrize(("name", "stored"), NAMES)
def test_weights_are_named_as_without_adapters(name: str, stored: str) -> None:
    assert stored_name(name) == stored


def test_parameters_of_adapters_are_told_by_name() -> None:
    assert is_adapter_name(f"{LAYER}.self_attn.q_proj.lora_magnitude_vector.default.weight")
    assert is_adapter_name("model.embed_tokens.lora_embedding_A.default")
    assert is_adapter_name("lm_head.modules_to_save.default.weight")
    assert not is_adapter_name("lm_head.original_module.weight")
    assert not is_adapter_name(f"{LAYER}.self_attn.q_a_proj.base_layer.weight")


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        (f"{LAYER}.q_proj.lora_A.default.weight", f"base_model.model.{LAYER}.q_proj.lora_A.weight"),
        (f"{LAYER}.q_proj.lora_magnitude_vector.default.weight",
         f"base_model.model.{LAYER}.q_proj.lora_magnitude_vector"),
        ("embed.lora_embedding_A.default", "base_model.model.embed.lora_embedding_A"),
        ("lm_head.modules_to_save.default.weight", "base_model.model.lm_head.weight"),
        ("lm_head.modules_to_save.other.weight", None),
        (f"{LAYER}.default.lora_A.other.weight", None),
        (f"{LAYER}.default.weight", None),
    ],
)  # fmt: skip
def test_files_of_peft_know_no_names_of_adapters(name: str, exported: str | None) -> None:
    assert exported_name(name, "default") == exported
