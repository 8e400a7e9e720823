"""Train a sharded model and the plain one side by side, and compare losses, routing and every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.core.placement import local_tensor
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.precision.config import PrecisionConfig
from tests.support.tiny_modules import TinyDecoder, batch_of, init_fn, reference

FP32 = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
Change = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Case:
    """A layout, a policy and a model to train."""

    degrees: dict[str, int] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    precision: PrecisionConfig = FP32
    micro_batches: int = 1
    steps: int = 20
    lr: float = 0.05
    passes_last: bool = True
    """Tell the engine which micro-batch is the last."""
    before: str = ""
    """Name of a function of this module that changes both models before they are sharded."""


def shard_tiny(case: Case, meshes: Meshes) -> nn.Module:
    model = TinyDecoder(meshes, **case.model)
    if case.before:
        globals()[case.before](model)
    for name, parameter in model.named_parameters():
        init_fn(name, parameter, local_tensor(parameter), meshes)
    policy = FSDPPolicy(fsdp=FSDPConfig(**case.fsdp), precision=case.precision, grad_divisor=1.0)
    return fully_shard(model, meshes, policy)


def train_case(case: Case) -> dict[str, float]:
    """Train both with SGD, the plain one on rank 0. The worst relative difference of losses, over all steps,
    and of gradients, at the first and the last step."""
    meshes = build_meshes(**case.degrees)
    model = shard_tiny(case, meshes)
    engine = engine_of(model)
    plain = None
    if dist.get_rank() == 0:
        plain = reference(**{**case.model, "recompute": "none"})
        if case.before:
            globals()[case.before](plain)
    worst = {"dense": 0.0, "expert": 0.0, "loss": 0.0}
    for step in range(case.steps):
        loss, routing = run_sharded(model, case, step)
        if plain is not None:
            wanted, wanted_routing = run_plain(plain, case, step)
            worst["loss"] = max(worst["loss"], relative(loss, wanted))
            assert torch.equal(routing, wanted_routing), "routing differs"
        if step in (0, case.steps - 1):
            check_gradients(model, plain, worst)
        sgd(model, plain, case.lr)
        engine.zero_grad()
    return worst


def run_sharded(model: nn.Module, case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Global loss and the routing of every rank, rank by rank and micro-batch by micro-batch."""
    loss, routing = torch.zeros(()), []
    for micro in range(case.micro_batches):
        last = micro == case.micro_batches - 1 or not case.passes_last
        with engine_of(model).micro_batch(last=last):
            part = model(*batch_of(step, micro, dist.get_rank()), count_of(case))
            part.backward()
        loss += part.detach()
        routing += take_routing(model)
    dist.all_reduce(loss)
    mine = torch.stack(routing)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return loss, torch.stack(everybody)


def run_plain(plain: nn.Module, case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    total, routing = torch.zeros(()), []
    plain.zero_grad()
    for rank in range(dist.get_world_size()):
        routed = []
        for micro in range(case.micro_batches):
            loss = plain(*batch_of(step, micro, rank), count_of(case))
            loss.backward()
            total += loss.detach()
            routed += take_routing(plain)
        routing.append(torch.stack(routed))
    return total, torch.stack(routing)


def count_of(case: Case) -> int:
    """Tokens of a whole step."""
    return dist.get_world_size() * case.micro_batches * 12


def take_routing(model: nn.Module) -> list[torch.Tensor]:
    """The expert choices of the forward that just ran, layer by layer."""
    found = [ids for layer in model.layers for ids in layer.moe.ids]
    for layer in model.layers:
        layer.moe.ids.clear()
    return found


def check_gradients(model: nn.Module, plain: nn.Module | None, worst: dict[str, float]) -> None:
    """Per parameter, against the plain model's where there is one; ``worst`` is told."""
    wanted = dict(plain.named_parameters()) if plain is not None else {}
    for name, parameter in model.named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.full_tensor()
        if plain is None:
            continue
        target = wanted.pop(name)
        assert parameter.shape == target.shape
        assert (gradient is None) == (target.grad is None or not target.requires_grad), name
        if gradient is not None:
            kind = "expert" if parameter.placement.mesh == "expert" else "dense"
            worst[kind] = max(worst[kind], relative(gradient, target.grad))
    assert not wanted


def relative(value: torch.Tensor, target: torch.Tensor) -> float:
    assert torch.isfinite(value).all()
    return ((value - target).abs().max() / target.abs().max().clamp_min(1e-12)).item()


@torch.no_grad()
def sgd(model: nn.Module, plain: nn.Module | None, lr: float) -> None:
    for each in (model, plain):
        for parameter in [] if each is None else each.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)


def freeze_some(model: nn.Module) -> None:
    """A whole unit, the embedding, and single vectors."""
    for name, parameter in model.named_parameters():
        if name.startswith(("embed", "layers.0", "layers.2")) or name.endswith("v.bias"):
            parameter.requires_grad_(False)


def recompute_inside(model: nn.Module) -> None:
    """Wrap each layer's forward, as a training framework would: hooks stay outside of the checkpoint."""
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
