"""What autograd keeps of a call, counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


def saved_activations(call: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd keeps for backward while ``call()`` runs the model; on meta tensors it computes
    nothing."""
    ours = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours and storage._cdata not in seen:
            seen[storage._cdata] = storage.nbytes()
            alive.append(storage)  # or its address would be used again
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(seen.values())
