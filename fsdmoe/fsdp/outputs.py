"""Tensors inside whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings (model outputs are some) and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes)) or value is None:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


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
