"""Tensors inside whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

_PLAIN = (str, bytes, int, float)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings (model outputs are some) and dataclasses, in order.

    One loop, not a recursion: it runs for the arguments and the results of every unit."""
    found: list[torch.Tensor] = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif item is None or isinstance(item, _PLAIN):
            continue
        elif isinstance(item, (tuple, list)):
            left.extend(reversed(item))
        elif isinstance(item, Mapping):
            left.extend(list(item.values())[::-1])
        elif hasattr(item, "__dataclass_fields__") and not isinstance(item, type):
            left.extend([getattr(item, name) for name in item.__dataclass_fields__][::-1])
    return found


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with every floating-point tensor in ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        made = value.copy()  # keeps the class of a model output
        for key, item in value.items():
            made[key] = cast_floats(item, dtype)  # one by one: transformers' outputs refuse update()
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(cast_floats(item, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: cast_floats(getattr(value, f.name), dtype) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    return value
