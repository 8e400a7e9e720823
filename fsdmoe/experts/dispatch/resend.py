"""Rows that experts received: not kept for backward, but sent again (``memory.recompute = ["dispatch"]``).

::

    forward     rows ──► experts ──► outputs                 received rows are gone with the experts' forward
    backward    gradients of outputs ──►┐
                rows, once more ───────►┴► experts           both are under way together

What is kept is what was sent, which the router keeps in any case. All ranks send again at the same place of
backward, where the gradients of outputs leave, whether or not a rank needs its rows.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.experts.dispatch.transfer import AsyncCollective, Pending, Transfer
from fsdmoe.kernels.packed_rows import pack_rows, unpack_rows
from fsdmoe.kernels.permute import RowPermutation, take_rows
from fsdmoe.memory.layer_call import LayerCall

PHASE = "dispatch.again"
"""As which the second way is counted."""


class ReceivedRows:
    """Rows of one call that are to come a second time: a source of what autograd saved of them."""

    def __init__(self) -> None:
        self._pending: Pending | None = None
        self._rows: Tensor | None = None

    def expect(self, pending: Pending) -> None:
        """They are under way. Backward may run twice: then they are sent twice."""
        self._pending = pending

    def fetch(self) -> Tensor:
        if self._pending is not None:
            self._rows = self._pending()
            self._pending = None
        if self._rows is None:
            raise AssertionError("expected rows to be sent again before the experts' backward asks for them")
        return self._rows


class Resend:
    """One call's rows: what was sent, how, and what comes of it."""

    def __init__(self, call: LayerCall, x_TD: Tensor) -> None:
        self._call = call
        self._x_TD = x_TD.detach()
        self._received = ReceivedRows()
        self._transfer: Transfer | None = None

    def sent_by(self, started: AsyncCollective) -> None:
        """Note the way that rows took."""
        self._transfer = copy.copy(started.transit.transfer)
        self._transfer.phase = PHASE

    def release(self, x_RD: Tensor) -> None:
        """What is saved of received rows from now on is not kept."""
        self._call.offer(x_RD, self._received)

    def with_outputs(self, started: AsyncCollective, permutation: RowPermutation | None) -> AsyncCollective:
        """Outputs on their way back: in backward, rows are sent right after the outputs' gradients."""
        order = () if permutation is None else permutation
        handle = _SendAgain.apply(started.handle, self._x_TD, self._transfer, self._received, *order)
        return replace(started, handle=handle)


class _SendAgain(torch.autograd.Function):
    """Nothing in forward; backward sends. What it saves is kept as all that the layer saves."""

    @staticmethod
    def forward(ctx, handle, x_TD, transfer, received, *permutation):
        ctx.save_for_backward(x_TD, *permutation)
        ctx.transfer = transfer
        # Weak: the node lives as long as the loss, rows until the experts' backward is done with them.
        ctx.received = weakref.ref(received)
        return handle.view_as(handle)

    @staticmethod
    @once_differentiable
    def backward(ctx, handle):
        x_TD, *permutation = ctx.saved_tensors
        x_MD = take_rows(x_TD, RowPermutation(*permutation)) if permutation else x_TD
        pending = _sending(ctx.transfer, x_MD)
        received = ctx.received()
        if received is None:  # nothing of them was saved here; the other ranks wait for this one all the same
            pending()
        else:
            received.expect(pending)
        return handle, *(None for _ in range(3 + len(permutation)))


def _sending(transfer: Transfer, x_MD: Tensor) -> Pending:
    if not transfer.packs:
        return transfer.forward(x_MD)
    packed = transfer.forward(pack_rows(x_MD))
    width, dtype = x_MD.shape[1], x_MD.dtype
    return lambda: unpack_rows(packed(), width, dtype)
