"""One parameter's part of its unit's gradient, and the sink through which kernels write it.

A loss that is computed chunk by chunk has its weight's gradient before backward begins. Kept in separate
memory it would be as large as the gradient buffers, when activations are at their peak. So it is *staged*:
made in the unit's gradient slot, which is unused between a forward and its backward. If the slot is needed
after all (another model call's backward comes first), the gradient is copied to separate memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fsdmoe.fsdp.access import ReadGuard
from fsdmoe.fsdp.flat_grad import FlatGrad
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.layout import OwnedRange, ParamSegment
from fsdmoe.fsdp.sharded_tensor import ShardedTensor, plain_attributes

# References to a gradient that the user did not keep: the attribute, a local name, getrefcount's argument.
_OWN_REFERENCES = 3


class StagedGradient:
    """A gradient of an operation whose backward has not run yet."""

    def __init__(self, place: torch.Tensor) -> None:
        self.tensor = place
        self.in_place = True
        """``tensor`` is where the reduction will read; False: the place was needed for another gradient."""

    def move_out(self) -> None:
        if self.in_place:
            self.tensor, self.in_place = self.tensor.clone(), False


class GradOwner(Protocol):
    """What a parameter's part needs of the unit's gradient."""

    discards: bool
    guard: ReadGuard

    @property
    def is_open(self) -> bool: ...

    def stage(self, param: ParamGrad) -> StagedGradient | None: ...

    def refuse_gradient(self, parameter: str) -> None: ...


class ParamGrad:
    """Views of the flat gradients for one parameter; :class:`GradBuffer` says when to use them."""

    def __init__(
        self, param: FlatParam, owner: GradOwner, flat: FlatGrad, place: tuple[ParamSegment, OwnedRange]
    ) -> None:
        """``place``: the parameter's range of ``full``, and this rank's range of ``main``."""
        self.param, self.flat, self.name = param, flat, param.name
        self.view: torch.Tensor | None = None
        """In ``full``: where backward writes."""
        self.piece: torch.Tensor | None = None
        """In ``main``: this rank's elements of the sum."""
        self.written = False
        """A gradient was written into ``view`` since it was last emptied."""
        self._owner = owner
        self._segment, self._owned = place
        self._sharded: ShardedTensor | None = None
        """``piece`` with the global shape: what users see as ``parameter.grad``."""
        self._shown: ShardedTensor | None = None
        self._staged: weakref.ref[StagedGradient] | None = None
        if param.plan.grad_share == 1:  # else what is written is not what a kernel computes
            param.unsharded.grad_sink = self  # type: ignore[attr-defined]
        # Autograd keeps hooks where the garbage collector cannot see them: a strong reference would never be
        # freed.
        take = weakref.WeakMethod(self._take_gradient)
        param.unsharded._post_accumulate_grad_hooks = _Hooks(partial(_call, take))

    @property
    def guard(self) -> ReadGuard:
        """Of the whole unit's gradient."""
        return self._owner.guard

    def bind(self) -> None:
        """Follow the group's flat tensors to where they lie now."""
        full, main = self.flat.full, self.flat.main
        if full is None:
            self.view = None
        elif self.view is None:
            self.view = full[self._segment.start : self._segment.end].view(self.param.plan.local_shape)
        if main is None:
            if self._sharded is not None:
                self._sharded.access.outlive_guard()  # a user may have kept it, and its memory with it
            self.piece = self._sharded = None
        elif self._sharded is None:
            held = main[self._owned.offset : self._owned.offset + self._owned.numel]
            self._sharded = self.param.sharded.with_piece(held, self._owner.guard)  # type: ignore[attr-defined]
            # The object itself: `p.grad.data = ...` puts another in its place.
            self.piece = self._sharded._piece
            if held.dtype != self.param.sharded.dtype:
                self.param.sharded.grad_dtype = held.dtype  # torch expects the parameter's own

    # The gradient sink (fsdmoe.kernels.grad_sink)

    def claim(self, staged: StagedGradient | None = None) -> tuple[torch.Tensor, bool] | None:
        """Where to write, and whether to add to what is there; None if this gradient is not wanted."""
        if self._owner.discards:  # before anything else: an earlier micro-batch may have left it open
            return None
        if not self._owner.is_open:
            self._owner.refuse_gradient(self.name)
        if self._staged is not None:
            self.make_space(staged)
        accumulate, self.written = self.written, True
        assert self.view is not None
        return self.view, accumulate

    @property
    def is_wanted(self) -> bool:
        """Whether :meth:`claim` would give a place in the backward that runs now."""
        return not self._owner.discards

    def stage(self) -> StagedGradient | None:
        """In forward: the place where backward wants the gradient, unless it is in use."""
        if not self.flat.reduces_in_fp32 and self.flat.has_own_full:
            return None  # chunks must not be added up in the precision of the exchange
        return self._owner.stage(self)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd's fallback: put what it accumulated where the reduction reads it."""
        gradient = parameter.grad
        if gradient is None:
            return
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

    # Staging

    @property
    def staged(self) -> StagedGradient | None:
        """What a forward left in ``view`` for its own backward."""
        return None if self._staged is None else self._staged()

    def stage_in_place(self) -> StagedGradient | None:
        if self.view is None or self.view.dtype != torch.float32:
            return None
        staged = StagedGradient(self.view)
        self._staged = weakref.ref(staged)
        return staged

    def make_space(self, claimant: StagedGradient | None = None) -> None:
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
        return self._shown is not None and not changed_by_user([self])

    def show(self) -> None:
        if self._shown is None:
            self.param.sharded.grad = self._shown = self._sharded

    def hide(self) -> None:
        if self._shown is not None:
            self._shown.access.is_zeroed = False
        self.param.sharded.grad = self._shown = None
        if self._sharded is not None and self._sharded._piece is not self.piece:
            self._sharded = None  # a user put other memory behind it (`p.grad.data = ...`) and keeps that
            self.bind()

    def drop(self, *, is_in_main: bool) -> None:
        """A user dropped or zeroed this parameter's gradient: it starts from nothing."""
        if self.is_zeroed:
            self._shown.access.is_zeroed = False  # type: ignore[union-attr]
        else:
            self.hide()
            if is_in_main:
                self.keep_for_user()  # before it is zeroed: only the user who zeroed it wants zeros
        self.written = False
        if is_in_main and self.piece is not None:
            self.piece.zero_()

    def adopt(self, factor: float) -> None:
        """Take the gradient that a user set; ``factor`` brings it to the scale of what ``main`` holds."""
        assert self.piece is not None
        assert self._sharded is not None
        self.param.sharded.with_piece(self.piece).copy_(self.user_grad)  # type: ignore[attr-defined]
        if factor != 1:
            self.piece.mul_(factor)
        self._sharded._piece, self._sharded.access.is_zeroed = self.piece, False
        self.param.sharded.grad = self._shown = self._sharded
        self.written = True  # backward adds to it

    def expire(self, why: str) -> None:
        """It is dropped before it was complete: a reference that the user kept must not be read."""
        if self._sharded is not None:
            self._sharded.access.expired = why
            self._sharded = None
            self.bind()

    def keep_for_user(self) -> None:
        """Before ``piece`` is overwritten: a gradient that a user kept past ``zero_grad`` keeps its value."""
        before = self._sharded
        if before is not None and (sys.getrefcount(before) > _OWN_REFERENCES or before.has_aliases):
            before.move_out(
                f"this gradient of {self.name} was dropped, and its memory serves the next one: clone() a "
                "gradient that is to outlive zero_grad()"
            )
            self._sharded = None
            self.bind()


def changed_by_user(params: Iterable[ParamGrad]) -> list[ParamGrad]:
    """Those whose ``parameter.grad`` is not what was shown there: set, dropped, rebound or zeroed since."""
    changed = []
    with plain_attributes():
        for param in params:
            shown = param._shown
            if param.param.sharded.grad is not shown or (
                shown is not None and (shown._piece is not param.piece or shown.access.is_zeroed)
            ):
                changed.append(param)
    return changed


def any_present(params: Sequence[ParamGrad]) -> bool:
    """Whether any of them has a gradient to step with."""
    shown = [param for param in params if param._shown is not None]
    return len(changed_by_user(shown)) < len(shown)


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
    alive = method()
    if alive is not None:
        alive(parameter)
