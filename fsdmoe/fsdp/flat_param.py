"""A parameter of a flat buffer: whole inside forward, sharded outside of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdmoe.fsdp.plan import ParamPlan
from fsdmoe.fsdp.units import OwnedParameter
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales


class FlatParam:
    """The two parameters that are registered in turn at the same places of the module tree.

    ``unsharded`` is a view of the gathered weights for its whole life; ``sharded`` is this rank's piece of
    the main weights, with the global shape."""

    __slots__ = ("__weakref__", "name", "piece", "places", "plan", "sharded", "unsharded", "version")

    def __init__(self, owned: OwnedParameter, plan: ParamPlan) -> None:
        self.name = owned.name
        self.places = owned.places
        self.plan = plan
        self.unsharded: nn.Parameter
        self.sharded: nn.Parameter
        self.piece: torch.Tensor
        """What ``sharded`` held when it was made; anything else later means that it was rebound."""
        self.version: int
        """Of ``unsharded``; a later one means that somebody wrote into the gathered copy."""

    def bind(self, weight: torch.Tensor, scales: WeightScales | None) -> None:
        """Make ``unsharded`` of its flat place in the gathered buffer, for life; ``scales``: of codes.

        A weight that autograd saved is a view of this memory, so a parameter must never move. ``.data``
        gives it a version counter of its own: a gather is not a modification in autograd's eyes."""
        own = torch.empty(0, dtype=weight.dtype, device=weight.device)
        own.data = weight.view(self.plan.stored_shape)
        if scales is not None:
            assert self.plan.dtensor is None, "codes of a weight whose module computes on DTensors"
            self.unsharded = QuantizedWeight(own, self.plan.requires_grad, scales=scales)
        else:
            shown = own if self.plan.dtensor is None else self.plan.dtensor.around(own)
            self.unsharded = nn.Parameter(shown, requires_grad=self.plan.requires_grad)
        for module, attribute in self.places[:1]:
            given = getattr(module._parameters[attribute], "__dict__", {})
            # Not the user's in place of its own scales.
            self.unsharded.__dict__.update(given | self.unsharded.__dict__)
        self.version = self.unsharded._version

    def is_intact(self) -> bool:
        """Whether ``sharded`` is still what the modules hold, around the memory it was made with."""
        sharded: Any = self.sharded
        for module, attribute in self.places:
            if module._parameters.get(attribute) is not sharded:
                return False
        if sharded._piece is not self.piece and _same_memory(sharded._piece, self.piece):
            sharded._piece = self.piece  # `model.to(its own device)` wraps the same memory again
        return sharded._piece is self.piece


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors are the same elements; empty ones have no address to compare."""
    alike = (one.dtype, one.device, one.numel()) == (other.dtype, other.device, other.numel())
    return alike and (not one.numel() or one.data_ptr() == other.data_ptr())
