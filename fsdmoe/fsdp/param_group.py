"""One group of a unit: parameters that share flat buffers, their weights and their gradient.

The group only ties them together. :class:`WeightBuffer` owns the weights, :class:`FlatGrad` the tensors of
the gradient, and the unit's :class:`GradBuffer` the gradient's state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdmoe.fsdp.context import GroupContext
from fsdmoe.fsdp.exchange import FlatGrad
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.grads import GradBuffer
from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.param_grad import ParamGrad, any_present
from fsdmoe.fsdp.plan import GroupPlan
from fsdmoe.fsdp.shard_layout import ShardLayout
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.fsdp.units import OwnedParameter
from fsdmoe.fsdp.weights import WeightBuffer
from fsdmoe.precision.quantized_weight import WeightScales


class ParamGroup:
    """Plan, weights, gradient and parameters of one group."""

    def __init__(self, plan: GroupPlan, owned: list[OwnedParameter], context: GroupContext) -> None:
        self.plan, self.context = plan, context
        by_name = {o.name: o for o in owned}
        self.params = [FlatParam(by_name[p.name], p) for p in plan.params]
        self.weights = WeightBuffer(plan, self.params, context)
        self.grad: FlatGrad | None = None
        self.param_grads: list[ParamGrad] = []
        """In the order of ``params``; none where nothing is trained."""
        self.mesh = plan.params[0].placement.mesh
        """Which mesh shards it: dense or expert."""
        self._owned = plan.layout.owned(context.meshes.rank(plan.axis))
        for param, spec, piece in zip(self.params, plan.params, self._owned, strict=True):
            layout = ShardLayout(spec.placement, piece.start, piece.end, context.meshes, plan.axis)
            sharded = ShardedTensor.around(piece.of(self.weights.main), layout, self.weights.guard)
            param.sharded = nn.Parameter(sharded, requires_grad=plan.requires_grad)
            param.piece = param.sharded._piece  # type: ignore[attr-defined]

    def bind_weights(self, full: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        """Give every parameter its place in the gathered buffer, for life; ``factors``: where those of codes
        in four bits are gathered."""
        self.weights.full = full
        codes = self.weights.four_bit
        scales: Sequence[WeightScales | None] = [None] * len(self.params)
        if codes is not None:
            codes.full = codes.factors if factors is None else factors
            scales = codes.scales()
        elif self.weights.scales is not None:
            scales = self.weights.scales.scales
        stored = self.plan.stored
        for param, segment, own in zip(self.params, self.plan.layout.segments, scales, strict=True):
            param.bind(full[stored(segment.start) : stored(segment.end)], own)

    def bind_grads(self, grads: GradBuffer, full: torch.Tensor | None) -> None:
        """Pass the gradient to its owner; ``full`` is its place in a slot, None where nothing is reduced."""
        self.grad = FlatGrad(self.plan, full, self.context)
        self.param_grads = grads.add_group(self.grad, self.params)

    def fill(self, param: FlatParam, value: torch.Tensor) -> None:
        """Take this rank's elements of a whole local tensor."""
        owned = self.owned_range(param)
        owned.of(self.weights.main).copy_(value.reshape(-1)[owned.start : owned.end])

    def owned_range(self, param: FlatParam) -> OwnedRange:
        return self._owned[self.params.index(param)]

    def sharded_view(self, param: FlatParam, flat: torch.Tensor) -> ShardedTensor:
        """A parameter's part of a flat tensor that is laid out as the main weights are (a moment)."""
        return param.sharded.with_piece(self.owned_range(param).of(flat))  # type: ignore[attr-defined]

    def busy_until(self, event: torch.cuda.Event | None) -> None:
        """Until ``event`` another stream writes the weights, all of them, and reads the unit's gradient."""
        self.weights.guard.pending = event
        for grad in self.param_grads[:1]:
            grad.guard.pending = event

    @property
    def has_grad(self) -> bool:
        """Some parameter has a gradient to step with."""
        return any_present(self.param_grads)
