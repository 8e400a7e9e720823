"""A rank of meshes that need no processes, and split modules that run without being sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdmoe.core.placement import local_tensor
from fsdmoe.mesh import Axis, mesh_without_groups


@dataclass(frozen=True)
class At:
    """Sizes and coordinates by axis; what is not named has one rank."""

    sizes: dict[Axis, int] = field(default_factory=dict)
    ranks: dict[Axis, int] = field(default_factory=dict)

    def size(self, axis: Axis) -> int:
        return self.sizes.get(axis, 1)

    def rank(self, axis: Axis) -> int:
        return self.ranks.get(axis, 0)

    def submesh(self, *axes: Axis) -> DeviceMesh:
        return mesh_without_groups({a: self.rank(a) for a in axes}, {a: self.size(a) for a in axes})

    def axis_of(self, mesh: DeviceMesh, dim: int) -> Axis | None:
        assert mesh.mesh_dim_names is not None
        return Axis(mesh.mesh_dim_names[dim])


def use_local_tensors(module: nn.Module) -> None:
    """Leave a split module with plain local parameters, as ``fully_shard`` shows them to it."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                owner.register_parameter(
                    name, nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)
                )
