"""The global gradient norm, and clipping by it.

Within one replica of the model every element has exactly one owner, dense or expert, whatever mesh shards
it. So the norm is one sum of squares over this rank's flat gradients and one small all-reduce over the ranks
of a replica: nothing is counted twice and no mesh is missed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from fsdmoe.core.labels import raise_noted
from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.fsdp.loss_scaling import note_scaler
from fsdmoe.kernels.backend import triton_for
from fsdmoe.mesh import Axis
from fsdmoe.precision.loss_scale import LossScaler

_CHUNK = 1 << 24  # elements that are scaled by way of a temporary


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
        is_finite = bool(torch.isfinite(self.total))
        raise_noted()  # behind the wait: what the device found by now is known
        return is_finite


@torch.no_grad()
def grad_norm(model: nn.Module, scaler: LossScaler | None = None) -> GradNorm:
    """The norm of the whole gradient, over dense and expert shards alike. Collective over all ranks.

    Args:
        model: A fully sharded model, after the backward of the last micro-batch.
        scaler: What the loss was scaled with; the norm is that of the gradient without the scale.

    Returns:
        The norms, as scalars on the device.
    """
    engine = engine_of(model)
    engine.require_complete_gradients()
    meshes, device = engine.meshes, engine.meshes.device
    squares = torch.zeros(2, dtype=torch.float32, device=device)
    norms: dict[str, list[torch.Tensor]] = {"dense": [], "expert": []}
    for gradient, mesh in _gradients(engine):
        if gradient.numel():
            # A few large buffers: one by one is two thirds of what torch takes for all of them in one call.
            norms[mesh].append(torch.linalg.vector_norm(gradient, dtype=torch.float32).to(device))
    for index, found in enumerate(norms.values()):
        if found:
            squares[index] = torch.stack(found).square().sum()
    if scaler is None or not scaler.enabled:
        meshes.add_up(squares, Axis.FSDP_TP)
        return GradNorm(squares.sum().sqrt(), *squares.sqrt().unbind())
    # Over the replicas too, though they have the same gradients: all ranks need the same bits to decide
    # alike.
    meshes.add_up(squares, Axis.WORLD)
    squares = torch.stack((squares.sum(), *squares)) / meshes.size(Axis.DP_OUTER)
    return GradNorm(*(squares.sqrt() / scaler.value).unbind())


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, scaler: LossScaler | None = None) -> GradNorm:
    """Scale all gradients so that their global norm is at most ``max_norm``. Collective.

    Args:
        model: A fully sharded model, after the backward of the last micro-batch.
        max_norm: The largest norm that is not scaled down; ``math.inf`` clips nothing.
        scaler: What the loss was scaled with; gradients are unscaled in the same pass over them.

    Returns:
        The norms before clipping, without the scale, as scalars on the device.
    """
    engine = engine_of(model)
    is_scaled = scaler is not None and scaler.enabled
    if engine.wants_scaler:
        note_scaler(engine, scaler)
    norm = grad_norm(model, scaler)
    if max_norm == math.inf and not is_scaled:
        return norm
    factor = torch.ones_like(norm.total)
    if max_norm < math.inf:
        # 1 for a norm of NaN: gaps between flat gradients, which nothing else writes on a single rank, would
        # have it for good, and with them the norms of all later steps.
        factor = torch.fmin(max_norm / (norm.total + 1e-6), factor)
    if scaler is not None and is_scaled:
        factor = factor / scaler.value
    _scale([gradient for gradient, _ in _gradients(engine)], factor)
    return norm


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """In fp32: torch would round ``factor`` to the format of gradients in bfloat16 first."""
    for gradient in gradients:
        factor = factor.to(gradient.device)
        fused = triton_for(gradient)
        if fused is not None:  # which looks at nothing where nothing is to be clipped
            fused.scale_(gradient, factor)
        elif gradient.dtype == torch.float32:
            gradient.mul_(factor)
        else:
            for part in gradient.split(_CHUNK):
                part.copy_(part.float().mul_(factor))


def _gradients(engine: Engine) -> list[tuple[torch.Tensor, str]]:
    """The flat gradients that there are, and which mesh shards each."""
    return [
        (group.grad.main, group.mesh)
        for group in engine.groups
        if group.grad is not None and group.grad.main is not None and group.has_grad
    ]
