"""A parameter of a flat buffer: whole inside forward, sharded in user hands. Also its own gradient sink."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.fsdp.staging import StagedGradient
from fsdmoe.fsdp.units import OwnedParameter

if TYPE_CHECKING:
    from fsdmoe.fsdp.param_group import ParamGroup


class FlatParam:
    """See the module's text; :class:`ParamGroup` gives it its places."""

    __slots__ = (
        "__weakref__", "full", "grad_face", "grad_view", "group", "name", "piece", "places", "sharded",
        "staged", "written",
    )  # fmt: skip

    def __init__(self, owned: OwnedParameter, group: ParamGroup) -> None:
        self.name = owned.name
        self.places = owned.places
        self.group = group
        self.full: nn.Parameter
        self.sharded: nn.Parameter
        self.piece: torch.Tensor
        self.grad_view: torch.Tensor | None = None
        self.grad_face: ShardedTensor | None = None
        self.written = False
        """Somebody wrote a gradient into ``grad_view`` since it was last emptied."""
        self.staged: weakref.ref[StagedGradient] | None = None
        """What a forward left in ``grad_view`` for its own backward."""

    def claim(self, staged: StagedGradient | None = None) -> tuple[torch.Tensor, bool]:
        """The gradient seam: where to write, and whether to add to what is there."""
        if not self.group.grads_open:
            self.group.refuse_gradient(self.name)
        if self.staged is not None:
            self.make_room(staged)
        accumulate, self.written = self.written, True
        assert self.grad_view is not None
        return self.grad_view, accumulate

    def stage(self) -> StagedGradient | None:
        """A gradient that forward makes may lie where backward wants it, unless that place is in use."""
        if self.is_staged or not self.group.can_stage():
            return None
        if self.grad_view is None or self.grad_view.dtype != torch.float32:
            return None
        staged = StagedGradient(self.grad_view)
        self.staged = weakref.ref(staged)
        return staged

    def make_room(self, claimant: StagedGradient | None = None) -> None:
        """Somebody is about to write here: what waits for another backward moves out."""
        waiting = self.staged() if self.staged is not None else None
        if waiting is not None and waiting is not claimant:
            waiting.move_out()
        self.staged = None

    @property
    def is_staged(self) -> bool:
        return self.staged is not None and self.staged() is not None

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd's fallback: put what it accumulated where the reduction reads it."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        view, accumulate = self.claim()
        gradient = gradient.detach() if gradient.requires_grad else gradient
        view.add_(gradient) if accumulate else view.copy_(gradient)

    def show(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.places:
            module._parameters[attribute] = parameter
