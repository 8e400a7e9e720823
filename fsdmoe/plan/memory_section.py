"""Which parts of a layer a configuration recomputes and offloads: reading its keys, writing them, and the
choices that a search goes through, from what costs least to what saves most."""

from __future__ import annotations

from typing import Any

from fsdmoe.config import Config
from fsdmoe.config.schema import SECTIONS
from fsdmoe.models.config import ModelConfig

Parts = frozenset[str]
NOTHING: Parts = frozenset()
WHOLE_LAYERS: Parts = frozenset({"layer"})
HAS_SECTION = "memory" in SECTIONS
"""The configuration names parts (``memory.recompute``); otherwise ``train.recompute`` knows three words."""


def parts_of(config: Config) -> tuple[Parts, Parts]:
    """Recomputed parts, offloaded activations."""
    if HAS_SECTION:
        memory: Any = config.memory  # type: ignore[attr-defined, unused-ignore]
        return frozenset(memory.recompute), frozenset(memory.offload)
    word: str = config.train.recompute
    return (NOTHING if word == "none" else frozenset({word})), NOTHING


def section_tables(recompute: Parts, offload: Parts) -> dict[str, dict[str, Any]]:
    """The same as tables of a configuration."""
    if HAS_SECTION:
        table: dict[str, Any] = {"recompute": sorted(recompute)} if recompute else {}
        table |= {"offload": sorted(offload)} if offload else {}
        return {"memory": table} if table else {}
    if offload or len(recompute) > 1:
        raise AssertionError(f"expected parts that a configuration can name, got {recompute} and {offload}")
    return {"train": {"recompute": next(iter(recompute), "none")}}


def recompute_choices(model: ModelConfig, *, is_wrapped: bool = False) -> tuple[Parts, ...]:
    """What a configuration of the model can recompute, the cheapest first."""
    if not HAS_SECTION:
        return (NOTHING, WHOLE_LAYERS) if is_wrapped else (NOTHING, frozenset({"norms"}), WHOLE_LAYERS)
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
    if not HAS_SECTION:
        return (NOTHING,)
    return (
        NOTHING,
        frozenset({"expert_pre_activation"}),
        frozenset({"layer_input", "mlp_norm_input", "attention_output", "expert_input",
                   "expert_pre_activation"}),
    )  # fmt: skip
