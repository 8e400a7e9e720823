"""DTensors that stock torch.distributed.checkpoint cannot write, brought to a form that it can.

It describes what a rank holds by one box. A strided split (torch's ``_StridedShard``, as of fused gates and
ups under tensor parallelism) gives a rank several: torch 2.13 refuses its box as one that overlaps others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def plain_placements(state: Any) -> Any:
    """A state for ``dcp.save``: strided splits made plain ones. Collective where there are any.

    Args:
        state: Nested dicts and lists, as ``get_state_dict`` returns them.

    Returns:
        The same nesting; tensors that need no change are the same objects.
    """
    if isinstance(state, Mapping):
        return {key: plain_placements(child) for key, child in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(plain_placements(child) for child in state)
    if not isinstance(state, DTensor) or not any(isinstance(p, _StridedShard) for p in state.placements):
        return state
    placements, local = list(state.placements), state.to_local().detach()
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard) and _is_alone(placement, placements):
            local = _unstride(local, placement, state.device_mesh.get_group(mesh_dim))
            placements[mesh_dim] = Shard(placement.dim)
    if placements != list(state.placements):
        state = DTensor.from_local(
            local, state.device_mesh, placements, run_check=False, shape=state.shape, stride=state.stride()
        )
    plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]
    return state.redistribute(placements=plain)


def _is_alone(placement: _StridedShard, placements: list[Any]) -> bool:
    """Nothing else splits this dim: torch 2.11 reads such a split as a part of two, and finds no other."""
    return sum(isinstance(p, (Shard, _StridedShard)) and p.dim == placement.dim for p in placements) == 1


def _unstride(local: torch.Tensor, placement: _StridedShard, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a plain split, from everybody's parts of a strided one."""
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    halves = zip(*(part.chunk(int(placement.split_factor), placement.dim) for part in parts), strict=True)
    whole = torch.cat([piece for half in halves for piece in half], placement.dim)
    return whole.chunk(group.size(), placement.dim)[group.rank()].contiguous()
