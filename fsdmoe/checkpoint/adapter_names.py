"""Names of a model with low-rank adapters around its layers, as ``peft`` makes them.

peft calls a layer that it put something around ``base_layer``, and the model that it put itself around
``base_model.model``. Checkpoints know neither, so the weights of a model have the same names with and without
adapters, and one file set loads into both::

    base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj  ->  model.layers.0.mlp.experts.down_proj
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight       ->  without base_model.model.

A module that an adapter trains as a whole (``modules_to_save``) is a copy in that adapter; what was there is
``original_module``::

    base_model.model.lm_head.original_module.weight           ->  lm_head.weight
    base_model.model.lm_head.modules_to_save.default.weight   ->  without base_model.model.

peft's files know neither the adapter's name nor that it is a copy (:func:`exported_name`).
"""  # noqa: E501

from __future__ import annotations

FACTORS = ("lora_A", "lora_B")
EMBEDDING_FACTORS = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"
COPIES = "modules_to_save"
SHELL = "base_model.model."
BASE = "base_layer"
ORIGINAL = "original_module"
INITIAL = (True, False, None, "gaussian", "orthogonal")
"""What ``init_lora_weights`` may be of adapters whose base is as it was."""
_PARTS = (*FACTORS, *EMBEDDING_FACTORS, MAGNITUDE, COPIES)


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return not set(_PARTS).isdisjoint(name.split("."))


def stored_name(name: str) -> str:
    """What a checkpoint calls a parameter. Adapters stay where they are: several may be around one layer."""
    name = name.removeprefix(SHELL)
    if is_adapter_name(name):
        return name
    for inside in (f".{BASE}.", f".{ORIGINAL}."):
        while inside in name:
            name = name.replace(inside, ".")
    return name


def adapted_module(name: str) -> tuple[str, str] | None:
    """The path of the module that the adapter of this parameter is around, and what the module is inside of
    it; None for a parameter of the model itself."""
    path = name.split(".")
    at = next((i for i, part in enumerate(path) if part in _PARTS), None)
    if at is None:
        return None
    return ".".join(path[:at]), ORIGINAL if path[at] == COPIES else BASE


def exported_name(name: str, adapter: str) -> str | None:
    """What peft's file calls a parameter of ``adapter``; None for one of another adapter or of the model."""
    path = name.split(".")
    at = next((i for i, part in enumerate(path) if part in _PARTS), None)
    if at is None or path[at + 1 : at + 2] != [adapter]:
        return None
    before, kind, rest = path[:at], path[at], path[at + 2 :]
    if kind == MAGNITUDE:
        rest = []
    return SHELL + ".".join(before + ([] if kind == COPIES else [kind]) + rest)
