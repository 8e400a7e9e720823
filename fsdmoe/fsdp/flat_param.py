"""A parameter of a flat buffer: whole inside forward, sharded in user hands."""

from __future__ import annotations

import torch
from torch import nn

from fsdmoe.fsdp.units import OwnedParameter


class FlatParam:
    """The two parameters that take turns at the same places of the module tree.

    ``unsharded`` is a view of the gathered weights for its whole life; ``sharded`` is this rank's piece of
    the main weights, with the global shape."""

    __slots__ = ("__weakref__", "name", "piece", "places", "sharded", "unsharded")

    def __init__(self, owned: OwnedParameter) -> None:
        self.name = owned.name
        self.places = owned.places
        self.unsharded: nn.Parameter
        self.sharded: nn.Parameter
        self.piece: torch.Tensor
        """What ``sharded`` held when it was made; anything else later means that somebody rebound it."""

    def to_unsharded(self) -> None:
        self._register(self.unsharded)

    def to_sharded(self) -> None:
        self._register(self.sharded)

    def _register(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.places:
            module._parameters[attribute] = parameter
