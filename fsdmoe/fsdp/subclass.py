"""Frozen parameters that are tensor subclasses (torchao's quantised weights): sharded by the tensors inside.

A subclass that torch can take apart (``__tensor_flatten__``) is sharded as the plain tensors it is made of,
each under the parameter's name and its own, in its own dtype. The module sees the subclass put together
again, built once: around the gathered buffers in forward and backward, around sharded tensors outside. What
is inside goes into checkpoints, so they fit any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdmoe.core.errors import refuse
from fsdmoe.core.placement import local_tensor
from fsdmoe.fsdp.config import FrozenSubclasses
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.fsdp.units import OwnedParameter, UnitChoice

PLAIN = (torch.Tensor, FakeTensor)
"""A fake tensor stands for a plain one where a step is only planned."""


def is_subclass(tensor: torch.Tensor) -> bool:
    """Neither plain nor one of the two kinds that we know by name."""
    return not isinstance(tensor, (DTensor, ShardedTensor)) and type(tensor.data) not in PLAIN


def inner_tensors(tensor: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain (or sharded) tensors of which a subclass is made, by dotted path."""
    if isinstance(tensor, ShardedTensor) or not is_traceable_wrapper_subclass(tensor):
        yield path, tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from inner_tensors(getattr(tensor, name), f"{path}.{name}" if path else name)


def take_apart(
    choices: list[UnitChoice], how: FrozenSubclasses, device: torch.device
) -> list[list[FlatSubclass]]:
    """Put what is inside of subclasses in their place among each unit's parameters, and return, by unit, the
    subclasses to put together again. Those that stay whole go to ``device`` and belong to no unit.

    Raises:
        ConfigError: One is trained, or cannot be taken apart; each is named.
    """
    problems = [p for choice in choices for o in choice.owned if (p := _problem(o, how)) is not None]
    refuse(problems)
    taken: list[list[FlatSubclass]] = []
    for choice in choices:
        subclasses = [owned for owned in choice.owned if is_subclass(owned.parameter)]
        choice.owned[:] = [owned for owned in choice.owned if not is_subclass(owned.parameter)]
        if how == "whole":
            for owned in subclasses:
                _place(owned, device)
            subclasses = []
        for owned in subclasses:
            choice.owned.extend(
                OwnedParameter(f"{owned.name}.{path}", nn.Parameter(part, False), keeps_dtype=True)
                for path, part in inner_tensors(owned.parameter)
            )
        taken.append([FlatSubclass(owned) for owned in subclasses])
    return taken


def _problem(owned: OwnedParameter, how: FrozenSubclasses) -> str | None:
    parameter, held = owned.parameter, local_tensor(owned.parameter)
    kind = type(held).__name__
    if isinstance(parameter, DTensor) and type(held) not in PLAIN:
        return f"fsdp: {owned.name} is a DTensor of a {kind}; expected one of a plain tensor"
    if not is_subclass(parameter):
        return None
    if parameter.requires_grad:
        return (
            f"fsdp: {owned.name} is a {kind} and trained; expected a plain tensor or a DTensor of one: "
            "freeze it (requires_grad_(False)) and train other parameters"
        )
    if how == "shard" and not is_traceable_wrapper_subclass(parameter):
        return (
            f"fsdp.frozen_subclasses: {owned.name} is a {kind}, which does not say what it is made of "
            "(__tensor_flatten__); write whole"
        )
    return None


def _place(owned: OwnedParameter, device: torch.device) -> None:
    if owned.parameter.device != device:
        moved = nn.Parameter(owned.parameter.to(device), requires_grad=False)
        for module, attribute in owned.places:
            module._parameters[attribute] = moved


class Assembly:
    """How to put a subclass together again, without the tensors of the original."""

    def __init__(self, tensor: Any) -> None:
        names, self._context = tensor.__tensor_flatten__()
        self._class, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()
        inner = {name: getattr(tensor, name) for name in names}
        self._parts = {
            name: Assembly(part) if is_traceable_wrapper_subclass(part) else None
            for name, part in inner.items()
        }

    def around(self, leaves: Mapping[str, torch.Tensor], path: str = "") -> Any:
        """The subclass around other tensors than those it came with, by dotted path."""
        inner = {}
        for name, part in self._parts.items():
            full = f"{path}.{name}" if path else name
            inner[name] = leaves[full] if part is None else part.around(leaves, full)
        return self._class.__tensor_unflatten__(inner, self._context, self._size, self._stride)


class FlatSubclass:
    """The two parameters that take turns at the places of one that was taken apart, as a
    :class:`FlatParam`'s do."""

    def __init__(self, owned: OwnedParameter) -> None:
        self.name, self.places = owned.name, owned.places
        self._assembly = Assembly(owned.parameter)
        self.unsharded: nn.Parameter
        self.sharded: nn.Parameter

    def bind(self, params: Mapping[str, FlatParam]) -> None:
        """Assemble both from their parts, once these have their places."""
        own = {n.removeprefix(f"{self.name}."): p for n, p in params.items() if n.startswith(f"{self.name}.")}
        whole = self._assembly.around({name: param.unsharded.data for name, param in own.items()})
        pieces = self._assembly.around({name: param.sharded.data for name, param in own.items()})
        self.unsharded = nn.Parameter(whole, requires_grad=False)
        self.sharded = nn.Parameter(pieces, requires_grad=False)

    def is_intact(self) -> bool:
        return all(module._parameters.get(name) is self.sharded for module, name in self.places)
