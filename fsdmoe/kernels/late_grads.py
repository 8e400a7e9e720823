"""Weight gradients that wait until the gradients of rows are on their way to other ranks.

Experts that stand on several ranks owe two things in backward: the gradients of the rows that came here,
which somebody waits for, and those of their own weights, which nobody needs before the layer is done.
Computed in this order, the second hide the way of the first::

    sent                      ── rows' gradients ──
    computed    ── of rows ── ──── of weights ────

Autograd runs the nodes that are ready in the reverse of the order in which they were made. So weights pass
through a node that is made *before* the rows are waited for (:func:`later`): in backward, starting the rows'
transfer comes first, then this node. The experts' own backward leaves there what is still to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.grad_sink import sink_of

Work = Callable[[], tuple[Tensor | None, Tensor | None]]
"""Computes the gradients of gate_up and down: what is left of them for autograd, None where a sink got it."""


class LateGrads:
    """What one backward of experts leaves for later."""

    def __init__(self, spare_sms: int = 0) -> None:
        self.spare_sms = spare_sms
        """Multiprocessors to leave to the rows' transfer."""
        self._work: Work | None = None

    def leave(self, work: Work) -> None:
        self._work = work

    def take(self) -> Work | None:
        """It holds activations: whoever takes it is the last to do so."""
        work, self._work = self._work, None
        return work


class LateWeights(NamedTuple):
    """Both projections as the experts shall use them, and where to leave the computation of gradients."""

    gate_up_E2ND: Tensor
    down_EDN: Tensor
    grads: LateGrads | None = None


def later(gate_up_E2ND: Tensor, down_EDN: Tensor, spare_sms: int = 0) -> LateWeights:
    """To be called before the rows are waited for; nothing changes where a weight needs no gradient."""
    weights = gate_up_E2ND, down_EDN
    if not (torch.is_grad_enabled() and all(weight.requires_grad for weight in weights)):
        return LateWeights(*weights)
    grads = LateGrads(spare_sms)
    passed: tuple[Tensor, Tensor] = _Later.apply(grads, *weights)
    for weight, same in zip(weights, passed, strict=True):
        if (sink := sink_of(weight)) is not None:
            same.grad_sink = sink  # type: ignore[attr-defined]
    return LateWeights(*passed, grads)


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grads: LateGrads, *weights: Tensor):
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        work = ctx.grads.take()
        return None, *(gradients if work is None else work())
