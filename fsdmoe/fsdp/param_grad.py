"""One parameter's part of its unit's gradient: where it lies, and what of it was handed out.

The unit's :class:`fsdmoe.fsdp.grads.GradBuffer` owns the memory and says when to do what; nothing here
decides. Two things are handed out. The owner holds them weakly once they are not its own any more, and so
finds out whether somebody still has them when it needs the memory:

================  ==========================================  ===============================================
handed out        to whom                                     when the memory is needed for another gradient
================  ==========================================  ===============================================
shown tensor      users, as ``parameter.grad``                it is the gradient; once dropped (zero_grad, or
                                                              by hand) a lease: who kept it gets a copy
staged gradient   an operation, from forward to backward      its values are copied to memory of their own
================  ==========================================  ===============================================

A loss that is computed chunk by chunk has its weight's gradient before backward begins. Kept in separate
memory it would be as large as the gradient buffers, when activations are at their peak. So it is *staged*:
made in the unit's gradient slot, which is unused between a forward and its backward. If the slot is needed
after all (another model call's backward comes first), the gradient is copied to separate memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from fsdmoe.fsdp.access import ReadGuard
from fsdmoe.fsdp.exchange import FlatGrad
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.layout import OwnedRange, ParamSegment
from fsdmoe.fsdp.sharded_tensor import Lease, ShardedTensor, plain_attributes
from fsdmoe.kernels.grad_sink import Staged


class GradOwner(Protocol):
    """What a parameter's part needs of the unit's gradient."""

    guard: ReadGuard
    discards: bool

    def require_open(self, parameter: str) -> None: ...

    def stage(self, param: ParamGrad) -> Staged | None: ...

    def note_write(self, view: torch.Tensor) -> None: ...


class ParamGrad:
    """A parameter's places in the flat gradients, and the sink through which kernels write there."""

    def __init__(
        self, param: FlatParam, owner: GradOwner, flat: FlatGrad, segment: ParamSegment, owned: OwnedRange
    ) -> None:
        """``segment``: the parameter's range of ``full``; ``owned``: this rank's range of ``main``."""
        self.param = param
        self.name = param.name
        self.flat = flat
        self.view: torch.Tensor | None = None
        """In ``full``: where backward writes."""
        self.piece: torch.Tensor | None = None
        """In ``main``: this rank's elements of the sum."""
        self.written = False
        """A gradient was written into ``view`` since it was last emptied."""
        self._owner = owner
        self._segment = segment
        self._owned = owned
        self._shown: ShardedTensor | None = None
        """``piece`` with the global shape: what was put at ``parameter.grad``, and not dropped since."""
        self._lease: Lease | None = None
        """What was shown before and dropped, until ``piece`` is written again."""
        self._staged: weakref.ref[Staged] | None = None
        if flat.main_dtype != param.sharded.dtype:
            param.sharded.grad_dtype = flat.main_dtype  # torch expects the parameter's own
        if param.plan.grad_share == 1:  # else what is written is not what a kernel computes
            param.unsharded.grad_sink = self  # type: ignore[attr-defined]
        # Autograd keeps hooks where the garbage collector cannot see them: a strong reference would never be
        # freed.
        take = weakref.WeakMethod(self._take_gradient)
        param.unsharded._post_accumulate_grad_hooks = _Hooks(partial(_call, take))
        self.bind()

    @property
    def guard(self) -> ReadGuard:
        """Of the whole unit's gradient."""
        return self._owner.guard

    def bind(self) -> None:
        """Follow the group's flat tensors to where they lie now; nothing is shown."""
        full = self.flat.full
        segment = self._segment
        self.view = None
        if full is not None:
            self.view = full[segment.start : segment.end].view(self.param.plan.local_shape)
        main = self.flat.main
        self.piece = None if main is None else self._owned.of(main)
        if main is None and self._lease is not None:
            self._lease.access.outlive_guard()  # a user kept a gradient, and its memory with it
            self._lease = None

    # The gradient sink (fsdmoe.kernels.grad_sink)

    def claim(self, staged: Staged | None = None) -> tuple[torch.Tensor, bool] | None:
        """Where to write, and whether to add to what is there; None if this gradient is not wanted."""
        if self._owner.discards:  # before anything else: an earlier micro-batch may have left it open
            return None
        self._owner.require_open(self.name)
        if self._staged is not None:
            self.make_space(staged)
        accumulate = self.written
        self.written = True
        assert self.view is not None
        return self.view, accumulate

    @property
    def is_wanted(self) -> bool:
        """Whether :meth:`claim` would give a place in the backward that runs now."""
        return not self._owner.discards

    def stage(self) -> Staged | None:
        """In forward: the place where backward wants the gradient, unless it is in use."""
        return self._owner.stage(self)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd's fallback: put what it accumulated where the reduction reads it."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        if self.param.plan.scaling is not None:
            raise RuntimeError(
                f"{self.name} is quantised, and something other than its own layer computed with it, so that "
                "autograd would round its gradient to eight bits; keep it out by precision.keep, or set "
                "precision.quantized_weights = false"
            )
        claimed = self.claim()
        if claimed is None:
            return
        view, accumulate = claimed
        gradient = gradient.detach() if gradient.requires_grad else gradient
        plan = self.param.plan
        share = plan.grad_share
        if plan.dtensor is not None:
            gradient, share = plan.dtensor.local_gradient(gradient)
        if share != 1:
            gradient = gradient * share
        view.add_(gradient) if accumulate else view.copy_(gradient)
        if view.is_cuda:
            self._owner.note_write(view)

    # Staging

    @property
    def staged(self) -> Staged | None:
        """What a forward left in ``view`` for its own backward."""
        return None if self._staged is None else self._staged()

    def stage_in_place(self) -> Staged:
        assert self.view is not None
        staged = Staged(self.view)
        self._staged = weakref.ref(staged)
        return staged

    def make_space(self, claimant: Staged | None = None) -> None:
        """This place is about to be written: a gradient staged for another backward is copied elsewhere."""
        waiting = self.staged
        if waiting is not None and waiting is not claimant:
            waiting.move_out()
        self._staged = None

    def clear(self) -> None:
        """Nothing was written here: it is zero. That is what later backwards add to: where ``full`` is
        ``main``, the other replicas' sum is about to be added to it."""
        self.make_space()
        assert self.view is not None
        self.view.zero_()
        self.written = True

    # What users see

    @property
    def user_grad(self) -> torch.Tensor | None:
        """What the user has as ``parameter.grad``; zeroed before it was complete counts as dropped."""
        return None if self.is_zeroed else self.param.sharded.grad

    @property
    def is_zeroed(self) -> bool:
        """The user zeroed it, in place, before it was complete."""
        shown = self._shown
        return shown is not None and shown.access.is_zeroed and self.param.sharded.grad is shown

    @property
    def is_present(self) -> bool:
        """There is a gradient to step with: some backward reached the unit, and it was not dropped since."""
        return self._shown is not None and not changed_by_user((self,))

    def show(self) -> None:
        if self._shown is None:
            assert self.piece is not None
            self._shown = self.param.sharded.with_piece(self.piece, self._owner.guard)  # type: ignore[attr-defined]
            self.param.sharded.grad = self._shown

    def hide(self, problem: str | None = None) -> None:
        """Take it from the user. One who kept it has a lease, or cannot read it for a ``problem``: it was not
        complete, and never will be."""
        shown = self._shown
        self.param.sharded.grad = self._shown = None
        if shown is None:
            return
        shown.access.is_zeroed = False
        if problem is not None:
            shown.access.expired = problem
            return
        tensor, access = weakref.ref(shown), weakref.ref(shown.access)
        del shown  # what is left is the user's
        if (held := access()) is not None:
            self._lease = Lease(tensor, held)

    def drop(self, *, is_in_main: bool) -> None:
        """A user dropped or zeroed this parameter's gradient: it starts from nothing."""
        if self.is_zeroed:
            self._shown.access.is_zeroed = False  # type: ignore[union-attr]
        else:
            self.hide()
            self.end_lease()  # before it is zeroed: only the user who zeroed it wants zeros
        self.written = False
        if is_in_main and self.piece is not None:
            self.piece.zero_()

    def adopt(self, factor: float) -> None:
        """Take the gradient that a user set; ``factor`` brings it to the scale of what ``main`` holds."""
        assert self.piece is not None
        self.param.sharded.with_piece(self.piece).copy_(self.user_grad)  # type: ignore[attr-defined]
        if factor != 1:
            self.piece.mul_(factor)
        self.show()
        assert self._shown is not None
        self._shown._piece = self.piece  # `p.grad.data = ...` put another there
        self._shown.access.is_zeroed = False
        self.param.sharded.grad = self._shown
        self.written = True  # backward adds to it

    def end_lease(self) -> None:
        """Before ``piece`` is overwritten: a gradient that a user kept past ``zero_grad`` keeps its value."""
        lease = self._lease
        self._lease = None
        if lease is not None:
            assert self.piece is not None
            lease.end(
                self.piece,
                f"this gradient of {self.name} was dropped, and its memory serves the next one: clone() a "
                "gradient that is to outlive zero_grad()",
            )


def changed_by_user(params: Iterable[ParamGrad]) -> list[ParamGrad]:
    """Those whose ``parameter.grad`` is not what was shown there: it was set, dropped, rebound or zeroed
    since. Asked several times a step for all parameters: one loop without calls."""
    with plain_attributes():
        return [
            param
            for param in params
            if (shown := param._shown) is not param.param.sharded.grad
            or (shown is not None and (shown._piece is not param.piece or shown.access.is_zeroed))
        ]


def end_leases(params: Iterable[ParamGrad]) -> None:
    """:meth:`ParamGrad.end_lease` of those that have one, which few steps do."""
    for param in params:
        if param._lease is not None:
            param.end_lease()


def any_present(params: Iterable[ParamGrad]) -> bool:
    """Some parameter has a gradient to step with."""
    shown = [param for param in params if param._shown is not None]
    return len(shown) > len(changed_by_user(shown))


class _Hooks(dict[Any, Any]):
    """Of a gathered weight, called in the order in which they stand here. The one that takes the gradient
    away stays the last: those of others (transformers sums gradients of norms over ``tp``) must find it."""

    _TAKE = "take"

    def __init__(self, take: Callable[[torch.Tensor], None]) -> None:
        super().__init__({self._TAKE: take})

    def __setitem__(self, key: Any, hook: Any) -> None:
        take = self.pop(self._TAKE)
        super().__setitem__(key, hook)
        super().__setitem__(self._TAKE, take)


def _call(method: weakref.WeakMethod[Any], parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        return  # a kernel wrote it where it belongs
    alive = method()
    if alive is not None:
        alive(parameter)
