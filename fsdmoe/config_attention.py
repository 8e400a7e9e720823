"""What tensor and context parallelism cannot divide, and what dynamic context parallelism cannot be combined
with."""

from __future__ import annotations

import contextlib
from typing import Protocol

from fsdmoe.context_parallel.config import ContextParallelConfig, check_context_parallel
from fsdmoe.context_parallel.planner import group_sizes
from fsdmoe.data import DataConfig
from fsdmoe.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.models.config import ModelConfig
from fsdmoe.tensor_parallel.split import check_tensor_parallel

Findings = list[tuple[tuple[str, ...], str]]


class Sections(Protocol):
    """The sections that attention and foreign models depend on."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def mesh(self) -> MeshConfig: ...
    @property
    def experts(self) -> ExpertsConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def context_parallel(self) -> ContextParallelConfig: ...


def attention_problems(config: Sections, world_size: int) -> Findings:
    """Each finding with the keys that it follows from."""
    model, mesh, problems = config.model, config.mesh, _dynamic_problems(config)
    heads = (model.num_attention_heads, *(() if model.is_mla else (model.num_key_value_heads,)))
    widths = (model.intermediate_size,) if model.first_k_dense_replace else ()
    tp = mesh.tp
    try:
        check_tensor_parallel(tp, heads=heads, vocab_size=model.vocab_size, widths=widths)
    except ConfigError as error:
        keys = ("mesh.tp", "model.preset", "model.num_attention_heads", "model.vocab_size")
        problems += [(keys, line) for line in error.problems]
        tp = 1  # so that what cp cannot divide is reported too
    try:
        check_context_parallel(
            config.context_parallel,
            sizes=_context_sizes(config, world_size),
            seq_len=config.data.seq_len,
            num_heads=model.num_attention_heads,
            num_kv_heads=heads[-1],
            tp=tp,
        )
    except ConfigError as error:
        whose = (
            "mesh.cp",
            "data.seq_len",
            "context_parallel.mode",
            "context_parallel.max_tokens",
            "model.preset",
        )
        problems += [(whose, line) for line in error.problems]
    return problems


def _context_sizes(config: Sections, world_size: int) -> tuple[int, ...]:
    """Every number of ranks that may share a sequence."""
    if config.context_parallel.dynamic:
        with contextlib.suppress(ConfigError):  # reported elsewhere
            degrees = resolve_degrees(config.mesh, world_size)
            return group_sizes(degrees.dp_shard * degrees.cp)
    return (config.mesh.cp,)


def _dynamic_problems(config: Sections) -> Findings:
    """Replicas plan their own micro-batches, perhaps of different number, so they cannot count together."""
    balance = config.experts.balance
    is_global = balance.global_batch or (balance.device and balance.device_scope == "global_batch")
    if not (config.context_parallel.dynamic and config.mesh.dp_outer > 1 and is_global):
        return []
    keys = ("experts.balance", "mesh.dp_outer", "context_parallel.dynamic")
    line = (
        "experts.balance: replicas plan their micro-batches apart under context_parallel.dynamic and cannot "
        f"count over the global batch together, got mesh.dp_outer = {config.mesh.dp_outer}; use "
        "experts.balance.sequence, or set mesh.dp_outer = 1"
    )
    return [(keys, line)]
