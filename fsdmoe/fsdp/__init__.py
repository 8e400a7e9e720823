"""Flat non-uniform sharding: parameters as ragged ranges of persistent flat buffers."""

from fsdmoe.fsdp.config import FSDPConfig, FSDPPolicy
from fsdmoe.fsdp.engine import Engine, engine_of
from fsdmoe.fsdp.fully_shard import fully_shard, is_fully_sharded, refuse_sharded
from fsdmoe.fsdp.memory_plan import MemoryPlan, ShardingTraffic, plan_memory
from fsdmoe.fsdp.sharded_tensor import ShardedTensor

__all__ = [
    "Engine",
    "FSDPConfig",
    "FSDPPolicy",
    "MemoryPlan",
    "ShardedTensor",
    "ShardingTraffic",
    "engine_of",
    "fully_shard",
    "is_fully_sharded",
    "plan_memory",
    "refuse_sharded",
]
