"""Modules that compute on DTensors: what they see of a gathered weight, and what becomes of its gradient.

A parameter that came as a DTensor (``parallelize_module``, ``distribute_tensor``, transformers' ``tp_plan``)
is shown to its module as a DTensor around its view of the gathered buffer, on the user's own mesh, for life.
Its gradient enters the gradient buffer as the plain local tensor that the sum over the shard axis wants:

===========================  =========================  ==================================================
the parameter over ``tp``    its gradient over ``tp``   what enters the buffer
===========================  =========================  ==================================================
a cut (``Shard``)            the same cut               the local tensor
a cut                        anything else              redistributed to the cut
``Replicate``                ``Partial``                the local tensor: the sum over ``tp`` is still to come
``Replicate``                ``Replicate``              the local tensor divided by ``tp``, for it is summed
``Replicate``                anything else              redistributed to ``Replicate``, then the same
a plain tensor               not said; see below        its gradient divided by ``tp``
===========================  =========================  ==================================================

A plain parameter of a model that is split by DTensors has no placement to tell. DTensors leave the tokens
between split layers to every rank of ``tp``, so that its gradient is whole on each of them; what works on a
rank's own tokens is a DTensor by ``SequenceParallel``. ``fsdp.debug`` checks it. (Where fsdmoe itself splits
over ``tp``, plain parameters always see a rank's own tokens, and their gradients are parts of the sum.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from fsdmoe.core.placement import SplitMeshes, computes_on_dtensor, make_dtensor
from fsdmoe.mesh import Axis


@dataclass(frozen=True)
class DTensorView:
    """A gathered weight as a module sees it that computes on DTensors."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> DTensorView:
        assert isinstance(parameter, DTensor)
        return cls(parameter.device_mesh, parameter.placements, tuple(parameter.shape))

    def around(self, local: torch.Tensor) -> DTensor:
        return make_dtensor(local, self.mesh, self.placements, self.global_shape)

    def local_gradient(self, gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
        """What of a gradient enters the buffer, and what it is multiplied with; see the table. Collective
        over the mesh where the gradient must be redistributed."""
        assert isinstance(gradient, DTensor)
        wanted, share = [], 1.0
        for dim, (own, arrived) in enumerate(zip(self.placements, gradient.placements, strict=True)):
            is_sum = type(arrived) is Partial and arrived.reduce_op == "sum"
            if own.is_replicate() and is_sum:
                wanted.append(arrived)
                continue
            wanted.append(own)
            if own.is_replicate():
                share /= self.mesh.size(dim)
        if tuple(wanted) != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local(), share


def is_split_by_dtensors(parameters: Iterable[torch.Tensor], at: SplitMeshes) -> bool:
    """Whether some module computes on DTensors over ``tp``: plain parameters then see the tokens of all its
    ranks."""
    return any(
        at.axis_of(p.device_mesh, dim) is Axis.TP
        for p in parameters
        if isinstance(p, DTensor) and computes_on_dtensor(p)
        for dim in range(p.device_mesh.ndim)
    )
