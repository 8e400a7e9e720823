"""Strided splits (torch's ``_StridedShard``, as of fused gates and ups under tensor parallelism) made plain.

A strided split gives a rank several boxes of a tensor, where a plain one gives it a single box.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@torch.no_grad()
def without_strides(tensor: DTensor) -> DTensor:
    """The same values under plain placements. Collective over the mesh of ``tensor`` if it has strides."""
    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return tensor
    mesh, shape = tensor.device_mesh, tensor.shape
    placements, local = list(tensor.placements), tensor.to_local().detach()
    for mesh_dim, placement in enumerate(placements):
        # torch 2.11 reads a strided split as a part of two, and finds no other where it is alone.
        if isinstance(placement, _StridedShard) and _is_alone(placement, placements):
            num_parts = mesh.size(mesh_dim) * int(placement.split_factor)
            if shape[placement.dim] % num_parts == 0:
                local = _unstride(local, placement, mesh.get_group(mesh_dim))
                placements[mesh_dim] = Shard(placement.dim)
    if placements != list(tensor.placements):
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=tensor.stride()
        )
    plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]
    return tensor.redistribute(placements=plain)


def _is_alone(placement: _StridedShard, placements: list[Any]) -> bool:
    """Nothing else splits this dim."""
    return sum(isinstance(p, (Shard, _StridedShard)) and p.dim == placement.dim for p in placements) == 1


def _unstride(local: torch.Tensor, placement: _StridedShard, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a plain split, from everybody's parts of a strided one."""
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    halves = zip(*(part.chunk(int(placement.split_factor), placement.dim) for part in parts), strict=True)
    whole = torch.cat([piece for half in halves for piece in half], placement.dim)
    return whole.chunk(group.size(), placement.dim)[group.rank()].contiguous()
