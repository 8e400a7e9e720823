"""The optimizer that the ``optim`` section names, for a fully sharded model."""

from __future__ import annotations

import torch
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.optim.adamw import AdamW
from fsdmoe.optim.config import MomentDtype, OptimConfig, check_rounding
from fsdmoe.optim.moments import MomentFormat, MomentPolicy
from fsdmoe.precision.config import torch_dtype


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over flat shards, or plain SGD on the sharded parameters.

    Args:
        model: From ``parallelize`` or ``fully_shard``.
        config: The ``optim`` section.
    """
    check_rounding(config.name, engine_of(model).policy.precision)
    if config.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr)
    return AdamW(
        model,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        moment_dtype=moment_policy(config).formats,
        state_offload=config.state_offload,
        state_prefetch=config.state_prefetch,
    )


def moment_policy(config: OptimConfig) -> MomentPolicy:
    """How AdamW keeps its moments by the ``optim`` section."""
    first, second = (_format(kept) for kept in config.moment_dtypes)
    return MomentPolicy(first, second, offload=config.state_offload, prefetch=config.state_prefetch)


def _format(kept: MomentDtype) -> MomentFormat:
    return "float8" if kept == "float8" else torch_dtype(kept)
