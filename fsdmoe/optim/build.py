"""The optimizer that the ``optim`` section names, for a fully sharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.memory_plan import MomentBytes, MomentCount
from fsdmoe.optim.adamw import AdamW
from fsdmoe.optim.config import MomentDtype, OptimConfig, check_rounding
from fsdmoe.optim.ema import with_average
from fsdmoe.optim.groups import is_matrix, make_groups
from fsdmoe.optim.moments import MomentFormat, MomentPolicy, moment_bytes
from fsdmoe.optim.muon import Muon, muon_bytes
from fsdmoe.precision.config import PrecisionConfig, torch_dtype


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or Muon over flat shards, or plain SGD on the sharded parameters.

    Args:
        model: From ``parallelize`` or ``fully_shard``.
        config: The ``optim`` section.
    """
    precision = engine_of(model).policy.precision
    check_rounding(config.name, precision)
    if config.name == "sgd":
        made = make_groups(model, config.groups, lr=config.lr, weight_decay=0.0, decays=lambda *_: False)
        return torch.optim.SGD([group.for_torch() for group in made if group.params], lr=config.lr)
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "groups": config.groups,
        "moment_dtype": _moment_policy(config, precision).formats,
    }
    if config.name == "muon":
        return Muon(model, muon=config.muon, **settings)
    return AdamW(
        model,
        decays=is_matrix,  # as optim.weight_decay says: a run is told nothing new by AdamW
        state_offload=config.state_offload,
        state_prefetch=config.state_prefetch,
        **settings,
    )


def count_state(config: OptimConfig, precision: PrecisionConfig) -> MomentCount:
    """What the optimizer of :func:`build_optimizer`, and an average of the weights, will hold for groups of
    parameters: for plans."""
    count = _count_moments(config, precision)
    return with_average(count, config.ema) if config.ema.decay else count


def _count_moments(config: OptimConfig, precision: PrecisionConfig) -> MomentCount:
    if config.name == "sgd":
        return lambda groups, at: MomentBytes(0)  # it has no momentum
    policy = _moment_policy(config, precision)
    return muon_bytes(policy, config.groups) if config.name == "muon" else moment_bytes(policy)


def _moment_policy(config: OptimConfig, precision: PrecisionConfig) -> MomentPolicy:
    """How AdamW keeps its moments."""
    first, second = (_format(kept) for kept in config.moment_dtypes)
    return MomentPolicy(
        first,
        second,
        offload=config.state_offload,
        prefetch=config.state_prefetch,
        stochastic=precision.main_rounding == "stochastic",
    )


def _format(kept: MomentDtype) -> MomentFormat:
    return torch_dtype(kept) if kept in ("float32", "bfloat16") else kept  # type: ignore[return-value]
