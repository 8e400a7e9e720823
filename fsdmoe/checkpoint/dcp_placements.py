"""DTensors that stock torch.distributed.checkpoint cannot write, brought to a form that it can.

It describes what a rank holds by one box. A strided split (torch's ``_StridedShard``, as of fused gates and
ups under tensor parallelism) gives a rank several: torch 2.13 refuses its box as one that overlaps others.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdmoe.fsdp.strided import without_strides


def plain_placements(state: Any) -> Any:
    """A state for ``dcp.save``: strided splits made plain ones. Collective where there are any.

    Args:
        state: Nested dicts and lists, as ``get_state_dict`` returns them.

    Returns:
        The same nesting; tensors that need no change are the same objects.
    """
    return tree_map_only(DTensor, without_strides, state)
