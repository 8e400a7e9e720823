"""A sharded model is neither moved nor converted: its parameters are views of buffers, which stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdmoe.errors import ConfigError

Change = Callable[[torch.Tensor], torch.Tensor]


def refuse_conversion(model: nn.Module) -> None:
    """From now on ``model.to()``, ``half()``, ``cuda()`` and their like raise where they would change a
    parameter. Without it the next forward would."""
    model._apply = partial(_apply_checked, weakref.ref(model))  # type: ignore[method-assign]


def _apply_checked(ref: weakref.ref[nn.Module], change: Change, recurse: bool = True) -> Any:
    model = ref()
    assert model is not None
    for dtype, device in {(p.dtype, p.device) for p in model.parameters()}:
        changed = change(torch.empty(0, dtype=dtype, device=device))
        if (changed.dtype, changed.device) != (dtype, device):
            raise ConfigError(
                f"parallelize: expected a sharded model's parameters to stay {_told(dtype, device)}, got "
                f"{_told(changed.dtype, changed.device)}; move, convert or freeze parameters before "
                "fsdmoe.parallelize (or fully_shard)"
            )
    return type(model)._apply(model, change, recurse)


def _told(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"
