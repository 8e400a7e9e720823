"""Which parts of a native decoder ``memory.recompute`` can name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from fsdmoe.core.errors import ConfigError
from fsdmoe.memory.config import MemoryConfig, Part
from fsdmoe.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import nn


def check_parts(memory: MemoryConfig, model: ModelConfig) -> None:
    """Refuse what the model does not have: parts, layers beyond its last, experts whose rows are kept."""
    if memory.keep == "rows" and not model.num_moe_layers:
        raise ConfigError(
            'memory.keep: expected a model with experts for "rows", got none; set memory.keep = "values"'
        )
    absent = {
        "mla_up": not model.is_mla,
        "shared_experts": not (model.n_shared_experts or model.first_k_dense_replace),
        "dispatch": not model.num_moe_layers,
    }
    named = [name for name in get_args(Part) if name in memory.recompute and absent.get(name)]
    if named:
        raise ConfigError(
            f"memory.recompute: expected parts that the model has, got {named[0]}, which no layer of a "
            f"{model.architecture} model of this shape has; drop it"
        )
    memory.parts_at(0, model.num_hidden_layers + model.num_nextn_predict_layers)


def prepare_parts(layers: Sequence[nn.Module], memory: MemoryConfig) -> None:
    """Tell experts, which keep what they need in kernels of their own. All else finds its part while it
    runs."""
    for index, layer in enumerate(layers):
        parts = memory.parts_at(index, len(layers))
        if "experts" in parts:
            recompute_experts(layer)
        if "dispatch" in parts:
            send_rows_again(layer)


def recompute_experts(layer: nn.Module) -> None:
    from fsdmoe.experts.moe import GroupedExperts  # not above: it loads torch

    for module in layer.modules():
        if isinstance(module, GroupedExperts):
            module.policy = module.policy._replace(recompute=True)


def send_rows_again(layer: nn.Module) -> None:
    from fsdmoe.experts.moe import MoE  # as above

    for module in layer.modules():
        if isinstance(module, MoE):
            module.send_again()
