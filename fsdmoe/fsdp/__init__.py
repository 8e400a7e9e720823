"""Flat non-uniform sharding: parameters as ragged ranges of persistent flat buffers."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.fsdp.config import FSDPConfig, FSDPPolicy
    from fsdmoe.fsdp.engine import Engine, engine_of
    from fsdmoe.fsdp.materialize import agree_on_values
    from fsdmoe.fsdp.memory_plan import MemoryPlan, ShardingTraffic, plan_memory
    from fsdmoe.fsdp.shard_model import (
        LostParameters,
        fully_shard,
        is_fully_sharded,
        refuse_hooked,
        refuse_sharded,
        shard_agreed,
    )
    from fsdmoe.fsdp.sharded_tensor import ShardedTensor

__getattr__ = lazy_names(__name__, __file__)
