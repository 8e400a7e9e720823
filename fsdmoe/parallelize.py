"""A model, the meshes and the policies in; a parallel model out.

Order matters, and this is the only place that knows it::

    experts split over ep and etp  ->  recompute  ->  compile  ->  flat sharding over what is left

The wings meet only here: experts leave placements on their parameters, sharding reads them.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.config import Config
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, fully_shard
from fsdmoe.mesh import Meshes
from fsdmoe.models.init import Initializer, materialize_buffers
from fsdmoe.precision.config import PrecisionConfig

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ParallelPolicy:
    """Everything that :func:`parallelize` decides by, beside the meshes."""

    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: Literal["none", "layer"] = "none"
    compile: bool = False
    seed: int = 0
    initializer_range: float = 0.02
    grad_divisor: float | None = None
    """1 for a loss that is already divided by its global count; None divides by the ranks that compute a
    loss, so that a per-rank mean loss behaves as under data parallelism."""

    @classmethod
    def from_config(cls, config: Config) -> ParallelPolicy:
        """The policy of ``train.py``, whose loss is global."""
        return cls(
            experts=config.experts,
            fsdp=config.fsdp,
            precision=config.precision,
            recompute=config.train.recompute,
            compile=config.train.compile,
            seed=config.train.seed,
            initializer_range=config.model.initializer_range,
            grad_divisor=1.0,
        )


def parallelize(model: Model, meshes: Meshes, policy: ParallelPolicy | None = None) -> Model:
    """Split, wrap and shard ``model`` in place; meta parameters are initialised shard by shard."""
    policy = policy or ParallelPolicy()
    choices = {
        parallelize_experts(module, meshes, dispatcher=policy.experts.dispatcher)
        for module in model.modules()
        if isinstance(module, MoE)
    }
    for choice in choices:
        logger.info("experts: dispatcher %s, %s", choice.dispatcher, choice.reason)
    for layer in _layers(model):
        if policy.compile:
            layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
        if policy.recompute == "layer":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    materialize_buffers(model, meshes.device)
    fully_shard(
        model,
        meshes,
        FSDPPolicy(fsdp=policy.fsdp, precision=policy.precision, grad_divisor=policy.grad_divisor),
        init_fn=Initializer(policy.seed, policy.initializer_range, meshes),
    )
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    """The elements of every outermost module list: the decoder layers."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return found
