"""Which parts of a layer a configuration recomputes and offloads: reading its keys, writing them, and the
choices that a search goes through, from what costs least to what saves most."""

from __future__ import annotations

from typing import Any

from fsdmoe.config import Config
from fsdmoe.models.config import ModelConfig

Parts = frozenset[str]
NOTHING: Parts = frozenset()
WHOLE_LAYERS: Parts = frozenset({"layer"})


def parts_of(config: Config) -> tuple[Parts, Parts]:
    """Recomputed parts, offloaded activations."""
    return frozenset(config.memory.recompute), frozenset(config.memory.offload)


def section_tables(recompute: Parts, offload: Parts) -> dict[str, dict[str, Any]]:
    """The same as tables of a configuration."""
    table: dict[str, Any] = {"recompute": sorted(recompute)} if recompute else {}
    table |= {"offload": sorted(offload)} if offload else {}
    return {"memory": table} if table else {}


def recompute_choices(model: ModelConfig, *, is_wrapped: bool = False) -> tuple[Parts, ...]:
    """What a configuration of the model can recompute, the cheapest first."""
    cheap = ["norms", "activation"]
    if model.is_mla:
        cheap.append("mla_up")
    has_mlp = model.n_shared_experts or model.first_k_dense_replace
    dearer = [*cheap, "shared_experts"] if has_mlp else cheap
    ladder = [cheap[:1], cheap[:2], cheap, dearer, [*dearer, "experts"]]
    if not model.is_mla:
        ladder.append([*dearer, "experts", "attention_projections"])
    return tuple(dict.fromkeys([NOTHING, *map(frozenset, ladder), WHOLE_LAYERS]))


def offload_choices() -> tuple[Parts, ...]:
    """What a configuration can offload."""
    return (
        NOTHING,
        frozenset({"expert_pre_activation"}),
        frozenset({"layer_input", "mlp_norm_input", "attention_output", "expert_input",
                   "expert_pre_activation"}),
    )  # fmt: skip
