"""Products over a rank's own experts with clones of others behind them: to the products, simply more experts.

Their weights are laid together in memory of its own, for a layer's forward and again for its backward;
autograd keeps the rank's own, which are there anyway. Computing clones in a second call would instead read
and write all rows once more, several times.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.expert_autograd import ExpertProducts, Given, Gradient, Grads
from fsdmoe.kernels.grad_sink import refuse_homeless, sink_of
from fsdmoe.precision.quantized_weight import decoded, scales_of


class ClonesHere(Protocol):
    """Clones on this rank, in one layer, as its backward needs them."""

    def joined_again(self) -> tuple[Tensor, Tensor]:
        """Both projections, own ones with those of clones behind."""
        ...

    def used(self) -> None:
        """One of the layer's chunks needs these no more in its backward."""
        ...

    def grad_place(self, number: int) -> tuple[Tensor, bool]:
        """The memory for the gradient of the clones' projection ``number``, and whether to add to it."""
        ...


class JoinedGradient:
    """Of a weight with clones behind it: its own part has its own place. See :class:`Gradient`."""

    def __init__(self, own: Gradient, num_own: int, clones: ClonesHere, number: int) -> None:
        self._own = own
        self._num_own = num_own
        self._clones = clones
        self._number = number

    def places(self) -> list[tuple[int, Tensor, bool]]:
        return [*self._own.places(), (self._num_own, *self._clones.grad_place(self._number))]

    def put(self, gradient: Tensor) -> None:
        self._own.put(gradient[: self._num_own])
        buffer, accumulate = self._clones.grad_place(self._number)
        clones = gradient[self._num_own :]
        buffer.add_(clones) if accumulate else buffer.copy_(clones)


def joined_values(own: Tensor, joined: Tensor, clones: ClonesHere, number: int) -> Tensor:
    """What weights with clones behind them stand for, in float32. Own gradients go where they do without
    clones."""
    values: Tensor = _JoinedValues.apply(own, joined, clones, number)
    return values


class _JoinedValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, joined: Tensor, clones: ClonesHere, number: int) -> Tensor:
        scales, sink = scales_of(joined), sink_of(own)
        ctx.own = Gradient(own, sink)
        ctx.place = len(own), clones, number
        if scales is not None:
            if ctx.needs_input_grad[0]:
                refuse_homeless(sink)
            return decoded(joined, scales, torch.float32)
        return joined.to(torch.promote_types(joined.dtype, torch.float32), copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own: Gradient = ctx.own
        JoinedGradient(own, *ctx.place).put(grad)
        return own.for_autograd, None, None, None


class ClonedProducts(NamedTuple):
    """Any products of experts in the precision of the weights, over clones too."""

    products: ExpertProducts
    clones: ClonesHere
    forward: list[Tensor]
    """Both projections with clones behind them, given up when forward is done."""

    def gate_up(self, given: Given, ids_RK: Tensor, *, keep: bool) -> tuple[list[Any], Any]:
        return self.products.gate_up(_joined(given, *self.forward), ids_RK, keep=keep)

    def down(self, given: Given, activated: list[Any]) -> Tensor:
        joined = _joined(given, *self.forward)
        self.forward.clear()
        return self.products.down(joined, activated)

    def down_dgrad(
        self, dy_RD: Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[tuple[Any, int], tuple[Any, Given]]:
        num_own = len(given.down_EDN)
        joined = _joined(given, *self.clones.joined_again())
        operands, rest = self.products.down_dgrad(dy_RD, joined, kept, grads)
        return (operands, num_own), (rest, joined)

    def wgrad(self, operands: tuple[Any, int], grads: Grads) -> None:
        of_products, num_own = operands
        both = [
            None if own is None else JoinedGradient(own, num_own, self.clones, number)
            for number, own in enumerate((grads.gate_up_E2ND, grads.down_EDN))
        ]
        self.products.wgrad(of_products, _joined(grads, *both))

    def gate_up_dgrad(self, operands: tuple[Any, Given], given: Given, grads: Grads) -> None:
        rest, joined = operands
        self.products.gate_up_dgrad(rest, joined, grads)
        self.clones.used()


def _joined(given: Any, gate_up: Any, down: Any) -> Any:
    return given._replace(gate_up_E2ND=gate_up, down_EDN=down)
