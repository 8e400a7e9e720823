"""The choices of the ``[memory]`` section that a search goes through, from what costs least to what saves
most, and how a choice is written."""

from __future__ import annotations

from typing import Any

from fsdmoe.memory.config import MemoryConfig
from fsdmoe.models.config import ModelConfig

Parts = frozenset[str]
NOTHING: Parts = frozenset()
WHOLE_LAYERS: Parts = frozenset({"layer"})


def section_table(memory: MemoryConfig) -> dict[str, Any]:
    """What differs from the defaults."""
    plain = MemoryConfig()
    changed = {key: value for key, value in vars(memory).items() if value != getattr(plain, key)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()}


def recompute_choices(model: ModelConfig, *, is_wrapped: bool = False) -> tuple[Parts, ...]:
    """What can be recomputed of the model, the cheapest first. Which parts a wrapped model has is known only
    once it is built, so of these norms alone are tried."""
    if is_wrapped:
        return NOTHING, frozenset({"norms"}), WHOLE_LAYERS
    cheap = ["norms"]
    has_mlp = bool(model.n_shared_experts or model.first_k_dense_replace)
    ladder = [list(cheap)]
    for part, is_there in (
        ("activation", has_mlp),
        ("mla_up", model.is_mla),
        ("shared_experts", has_mlp),
        ("experts", True),
        ("attention_projections", not model.is_mla),
    ):
        if is_there:
            cheap.append(part)
            ladder.append(list(cheap))
    return (NOTHING, *map(frozenset, ladder), WHOLE_LAYERS)


def offload_choices() -> tuple[Parts, ...]:
    """What can wait in host memory."""
    return (
        NOTHING,
        frozenset({"expert_pre_activation"}),
        frozenset({"layer_input", "mlp_norm_input", "attention_output", "expert_input",
                   "expert_pre_activation"}),
    )  # fmt: skip


def chosen(memory: MemoryConfig, recompute: Parts, offload: Parts) -> MemoryConfig:
    """The section with these parts, in all layers."""
    return MemoryConfig(
        keep=memory.keep,
        recompute=tuple(sorted(recompute)),  # type: ignore[arg-type]
        offload=tuple(sorted(offload)),  # type: ignore[arg-type]
        offload_keep_last=memory.offload_keep_last,
    )
