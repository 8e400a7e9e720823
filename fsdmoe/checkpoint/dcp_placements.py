"""DTensors that stock torch.distributed.checkpoint writes wrongly, brought to a form that it writes right.

It describes what a rank holds by one box. A strided split (torch's ``_StridedShard``, as of fused gates and
ups under tensor parallelism) gives a rank several, and the one that is written is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in state.placements]
    return state.redistribute(placements=plain)
