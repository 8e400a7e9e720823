"""Everything that a run is made from: the sections, each declared next to the part that reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.config.train import TrainConfig
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.core.axes import MeshConfig
from fsdmoe.data.config import DataConfig
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp.config import FSDPConfig
from fsdmoe.health.config import HealthConfig
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.huggingface.preference_config import PreferenceConfig
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.models.config import ModelConfig
from fsdmoe.observe.config import ObserveConfig
from fsdmoe.optim.config import OptimConfig
from fsdmoe.precision.config import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made from, a section a part."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


SECTIONS: dict[str, type[Any]] = {f.name: f.default_factory for f in dataclasses.fields(Config)}  # type: ignore[misc]
"""The class of every section, in the order of a printed configuration."""


def by_dotted_key(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of a configuration, as its key is written on the command line."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        own = (
            by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
        found |= own
    return found
