"""Names of a model with low-rank adapters around its layers, as ``peft`` makes them.

peft calls a layer that it put something around ``base_layer``, and the model that it put itself around
``base_model.model``. Checkpoints know neither, so the weights of a model have the same names with and without
adapters, and one file set loads into both::

    base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj  ->  model.layers.0.mlp.experts.down_proj
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight       ->  without base_model.model.
"""  # noqa: E501

from __future__ import annotations

FACTORS = ("lora_A", "lora_B")
MAGNITUDE = "lora_magnitude_vector"
SHELL = "base_model.model."
_BASE = ".base_layer."


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return not {*FACTORS, MAGNITUDE}.isdisjoint(name.split("."))


def stored_name(name: str) -> str:
    """What a checkpoint calls a parameter. Adapters stay where they are: several may be around one layer."""
    name = name.removeprefix(SHELL)
    if is_adapter_name(name):
        return name
    while _BASE in name:
        name = name.replace(_BASE, ".")
    return name
