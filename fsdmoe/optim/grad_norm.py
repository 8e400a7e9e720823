"""The global gradient norm, and clipping by it.

Within one replica of the model every element has exactly one owner, dense or expert, whatever mesh shards
it. So the norm is one sum of squares over this rank's flat gradients and one small all-reduce over the ranks
of a replica: nothing is counted twice and no mesh is forgotten."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.mesh import Axis


@dataclass(frozen=True)
class GradNorm:
    """Norms over the whole model, as scalars on the device. Reading one as a number waits for it."""

    total: torch.Tensor
    """Of all gradients."""
    dense: torch.Tensor
    """Of what the dense mesh shards."""
    expert: torch.Tensor
    """Of the experts."""

    @property
    def found_inf(self) -> torch.Tensor:
        """1.0 if any gradient is infinite or not a number, else 0.0, on the device; for ``AdamW.step``."""
        return (~torch.isfinite(self.total)).float()

    def is_finite(self) -> bool:
        """Whether every gradient is a finite number. Waits for the device."""
        return bool(torch.isfinite(self.total))


@torch.no_grad()
def grad_norm(model: nn.Module) -> GradNorm:
    """The norm of the whole gradient, over dense and expert shards alike. Collective over all ranks.

    Args:
        model: A fully sharded model, after the backward of the last micro-batch.

    Returns:
        The norms, as scalars on the device.
    """
    engine = engine_of(model)
    engine.require_complete_gradients()
    device = engine.meshes.device
    squares = torch.zeros(2, dtype=torch.float32, device=device)
    for index, mesh in enumerate(("dense", "expert")):
        found = [g for g in _gradients(engine, mesh) if g.numel()]
        if found:
            norms = torch._foreach_norm(found, 2, dtype=torch.float32)
            squares[index] = torch.stack([norm.to(device) for norm in norms]).square().sum()
    dist.all_reduce(squares, group=engine.meshes.group(Axis.FSDP_TP))
    return GradNorm(squares.sum().sqrt(), *squares.sqrt().unbind())


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> GradNorm:
    """Scale all gradients so that their global norm is at most ``max_norm``. Collective.

    Args:
        model: A fully sharded model, after the backward of the last micro-batch.
        max_norm: The largest norm that is left alone.

    Returns:
        The norms before clipping, as scalars on the device.
    """
    norm = grad_norm(model)
    scale = (max_norm / (norm.total + 1e-6)).clamp(max=1.0)
    for gradients in _by_device(engine_of(model)):
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


def _gradients(engine: Engine, mesh: str) -> list[torch.Tensor]:
    return [
        group.main_grad
        for group in engine.groups
        if group.has_grad and group.main_grad is not None and group.params[0].sharded.placement.mesh == mesh  # type: ignore[attr-defined]
    ]


def _by_device(engine: Engine) -> list[list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in (*_gradients(engine, "dense"), *_gradients(engine, "expert")):
        found.setdefault(gradient.device, []).append(gradient)
    return list(found.values())
