"""The gradient of one unit: the only owner of where it lies and of the states it goes through.

Each trainable group has two flat tensors (:class:`FlatGrad`)::

    full   [slice x ranks]   in a slot that units share: backward writes views of it, the reduction reads it
    main   [slice]           the sum over ranks: what ``parameter.grad`` shows and the optimizer reads

Where one rank holds a group alone and nothing is offloaded, ``full`` is ``main``. What users, kernels and
operations are given of them is in :mod:`fsdmoe.fsdp.param_grad`; all of it is asked for and given back here.

=========  ==============================  ===========================  =====================================
state      full                            main                         left by
=========  ==============================  ===========================  =====================================
EMPTY      nothing, or staged by forward   nothing                      ``open``
OPEN       backward adds to it             as before ``open``           ``reduce``, ``interrupt``
REDUCING   read by the reduce stream       being added to               ``settle``, ``interrupt``; ``open`` if
                                                                        reached again, ``finalize``
PARTIAL    nothing, or staged by forward   summed over shards only      ``open``, ``finalize``
FINAL      nothing, or staged by forward   over replicas too, divided   ``open``
BROKEN     unknown                         unknown                      dropping it
=========  ==============================  ===========================  =====================================

A user may drop gradients in any state and by any means (our ``zero_grad``, torch's, ``p.grad = None``): that
leads to EMPTY, or for single parameters to nothing in their place. Zeroing all of it in place leads to a
FINAL gradient of zeros. So that torch's ``zero_grad`` always has something to drop, ``parameter.grad`` is set
as soon as a gradient is OPEN; until it is complete, reading it raises. BROKEN is what a backward that raised
leaves.

Everything that leads to a collective depends on the order in which units run and on nothing else, so that
all ranks issue the same collectives in the same order even if a parameter is used on some of them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from fsdmoe.core.autograd import is_in_backward
from fsdmoe.core.capturing import is_capturing
from fsdmoe.fsdp.access import ReadGuard
from fsdmoe.fsdp.buffer import Slot
from fsdmoe.fsdp.collectives import CommStreams, Stage
from fsdmoe.fsdp.exchange import FlatGrad
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.param_grad import ParamGrad, changed_by_user, end_leases
from fsdmoe.fsdp.sharded_tensor import plain_attributes
from fsdmoe.kernels.grad_sink import Staged


class GradState(Enum):
    """Of a unit's gradient; see the module's text."""

    EMPTY = auto()
    OPEN = auto()
    REDUCING = auto()
    PARTIAL = auto()
    FINAL = auto()
    BROKEN = auto()

    __hash__ = object.__hash__  # each is one object; Enum's own is a call of Python in every look-up


_EMPTY, _OPEN, _REDUCING = GradState.EMPTY, GradState.OPEN, GradState.REDUCING
_PARTIAL, _FINAL, _BROKEN = GradState.PARTIAL, GradState.FINAL, GradState.BROKEN
MOVES = {
    _EMPTY: {_OPEN, _FINAL},  # FINAL: a user set ``parameter.grad``
    _OPEN: {_REDUCING, _FINAL, _BROKEN, _EMPTY},  # FINAL: a user zeroed all of it
    _REDUCING: {_OPEN, _REDUCING, _PARTIAL, _FINAL, _BROKEN, _EMPTY},
    _PARTIAL: {_OPEN, _REDUCING, _FINAL, _EMPTY},
    _FINAL: {_OPEN, _EMPTY},
    _BROKEN: {_FINAL, _EMPTY},
}
"""From each state, where it may lead."""


class GradSnapshot(NamedTuple):
    """All that decides what a backward does with a unit's gradient, and that a backward leaves behind on the
    host; equal snapshots lead to the same operations on the device."""

    state: GradState
    main_state: GradState
    written: tuple[bool, ...]
    """By parameter: a gradient was written since it was last emptied."""
    divisors: tuple[float, ...]
    is_staged: bool
    """A forward left a gradient for a backward that has not run."""
    is_tenant: bool
    is_stager: bool
    is_padded: bool
    """The padding of its layout is zero in its slot."""


class GradSlot(Slot):
    """Memory for whole gradients that units use in turn."""

    tenant: GradBuffer | None = None
    """The unit whose gradient was OPEN in it last."""
    stager: GradBuffer | None = None
    """The unit whose forward left gradients in it last."""
    padding_of: object = None
    """The layout (its key) for which the padding is zero."""


class GradBuffer:
    """The gradient of one unit; see the module's text."""

    def __init__(self, name: str, slot: GradSlot | None, streams: CommStreams) -> None:
        self.name = name
        self.slot = slot
        self.state = _EMPTY
        self.param_grads: list[ParamGrad] = []
        self.discards = False
        """The backward under way computes no parameter's gradient (``torch.autograd.grad``)."""
        self._flats: list[FlatGrad] = []
        self._layout_key: tuple[object, ...] = ()
        self._main_state = _EMPTY
        """What ``main`` holds when everything that was started is done: EMPTY, PARTIAL or FINAL."""
        self._stream = streams.reduce
        self._handle = streams.reduce.handle()
        self._written = streams.event()
        self._written_elsewhere: list[torch.cuda.Event] = []
        self.guard = ReadGuard()
        self._problems = _problems(name)

    def add_group(self, flat: FlatGrad, params: Sequence[FlatParam]) -> list[ParamGrad]:
        """Take a group's tensors; called once a group, while the unit is built."""
        if not flat.is_lean:
            flat.allocate()
        layout = flat.plan.layout
        places = zip(params, layout.segments, layout.owned(flat.rank), strict=True)
        grads = [ParamGrad(param, self, flat, segment, owned) for param, segment, owned in places]
        self._flats.append(flat)
        self._layout_key = (*self._layout_key, flat.layout_key)
        self.param_grads += grads
        return grads

    # The schedule

    def open(self) -> None:
        """Backward is about to write gradients of this unit."""
        self.discards = False
        self.take_user_changes()
        if self.state is _BROKEN:
            raise RuntimeError(self._problems[_BROKEN])
        if self.state is not _OPEN:
            self._begin()
        with plain_attributes():
            for param in self.param_grads:
                param.show()

    def discard(self) -> None:
        """The backward under way computes no parameter's gradient: what kernels would write is not wanted."""
        self.discards = True

    def _begin(self) -> None:
        # A unit that backward reaches twice writes main again, with or without a slot; an optimizer may still
        # read main on a stream of its own.
        self.guard.wait()
        if self.slot is not None:
            self._enter_slot(self.slot)
        if self._main_state is _EMPTY:
            self._prepare_main()
        for param in self.param_grads:
            if self._main_state is _EMPTY or param.flat.has_own_full:
                param.written = False
        if self._main_state is _FINAL:
            for flat in self._flats:
                if not flat.has_own_full and flat.partial_factor != 1:
                    flat.main.mul_(flat.partial_factor)  # type: ignore[union-attr]
        self._transition(_OPEN)

    def reduce(self, *, last: bool) -> None:
        """Close the gradient and add it to ``main``; finish ``main`` with the last micro-batch."""
        for param in self.param_grads:
            if not param.written:
                param.clear()
        stages: list[Stage] = []
        for flat in self._flats:
            factor = {_EMPTY: None, _PARTIAL: 1.0, _FINAL: flat.partial_factor}[self._main_state]
            stages += flat.add(factor, finish=last)
        self._start(stages, _FINAL if last else _PARTIAL)
        if self.slot is not None and any(flat.exchange_spoils_padding for flat in self._flats):
            self.slot.padding_of = None

    def finalize(self) -> None:
        """The step's last micro-batch is over: complete what earlier ones left."""
        if self.state in (_EMPTY, _FINAL):
            return
        self.take_user_changes()
        if self.state is _OPEN:
            self.reduce(last=True)
        elif self.state is not _BROKEN and self._main_state is _PARTIAL:
            self._start([stage for flat in self._flats for stage in flat.finish()], _FINAL)

    def settle(self) -> None:
        """Backward is over and the caller's further work is ordered behind all reductions."""
        self.discards = False
        self._written_elsewhere.clear()  # autograd has joined its streams
        if self.guard.pending is self._handle:  # an optimizer's own stream may not be done yet
            self.guard.pending = None
        if self.state is _REDUCING:
            self._transition(self._main_state)

    def interrupt(self) -> None:
        """Backward raised: this unit's part of the gradient is unusable."""
        self.discards = False
        if self.state in (_OPEN, _REDUCING):
            self._transition(_BROKEN)
            self.take_user_changes()  # a reduction may have overwritten what was zeroed in place since

    def drop(self) -> None:
        """Drop the gradient: the next backward starts from nothing."""
        problem = self._problems.get(self.state)
        with plain_attributes():
            for param in self.param_grads:
                param.hide(problem)
        if self.state is not _EMPTY:
            self._main_state = _EMPTY
            self._transition(_EMPTY)

    def take_user_changes(self) -> None:
        """Take up what users did to ``parameter.grad`` directly."""
        changed = changed_by_user(self.param_grads)
        if not changed:
            return
        self.guard.wait()
        if all(param.user_grad is None for param in self.param_grads):
            if any(param.is_zeroed for param in self.param_grads):
                for param in self.param_grads:
                    param.drop(is_in_main=False)
                self._make_zero()
            else:
                self.drop()
        elif self.state is not _BROKEN:  # which it is until all of it was dropped
            for param in changed:
                if param.user_grad is None:
                    param.drop(is_in_main=self._main_state is not _EMPTY)
                else:
                    self._adopt(param)

    def release_memory(self) -> None:
        """With ``fsdp.lean``: give back the memory of a main gradient that holds nothing."""
        self.take_user_changes()
        if self.state is not _EMPTY:
            return
        for flat in self._flats:
            params = [param for param in self.param_grads if param.flat is flat]
            if (
                flat.is_lean
                and flat.main is not None
                and (flat.has_own_full or not any(p.staged for p in params))
            ):
                flat.free()
                for param in params:
                    param.bind()

    # What others ask

    def require_complete(self) -> None:
        """Raise unless the gradient may be stepped with, or there is none."""
        self.take_user_changes()
        if self.state not in (_EMPTY, _FINAL):
            raise RuntimeError(self._problems[self.state])

    def require_open(self, parameter: str) -> None:
        """Raise unless a gradient of ``parameter`` may be written now."""
        if self.state is not _OPEN:
            raise RuntimeError(
                f"a gradient of {parameter} arrived while the backward of {self.name} was not under way. "
                "Either its forward ran in a re-entrant checkpoint (pass use_reentrant=False), or it "
                "returned tensors inside an object that is not a tuple, list, dict or dataclass, or the "
                "parameter was used outside of its forward"
            )

    def set_divisor(self, divisor: float) -> None:
        """Divide the sums over ranks by another number from the next backward on."""
        self.take_user_changes()
        if self.state is not _EMPTY:
            raise RuntimeError(f"{self.name} has a gradient that was divided already; call zero_grad() first")
        for flat in self._flats:
            flat.set_divisor(divisor)

    @property
    def is_open(self) -> bool:
        return self.state is _OPEN

    @property
    def is_partial(self) -> bool:
        """Between two backwards: it waits for the step's last one."""
        return self.state is _OPEN or self.state is _PARTIAL

    @property
    def is_staged(self) -> bool:
        return any(param.staged is not None for param in self.param_grads)

    # Micro-batches that a CUDA graph replays

    def snapshot(self) -> GradSnapshot:
        """What the host knows of this gradient; between two micro-batches."""
        slot = self.slot
        return GradSnapshot(
            self.state,
            self._main_state,
            written=tuple(param.written for param in self.param_grads),
            divisors=tuple(flat.divisor for flat in self._flats),
            is_staged=self.is_staged,
            is_tenant=slot is not None and slot.tenant is self,
            is_stager=slot is not None and slot.stager is self,
            is_padded=slot is not None and slot.padding_of == self._layout_key,
        )

    def prepare_replay(self) -> None:
        """A graph is about to write this gradient, as a backward would after :meth:`open`."""
        if self.state is _EMPTY:
            self._prepare_main()

    def restore(self, after: GradSnapshot) -> None:
        """A graph was replayed whose capture left this state."""
        self._main_state, self.state = after.main_state, after.state
        self.guard.problem = self._problems.get(after.state)
        for param, written in zip(self.param_grads, after.written, strict=True):
            param.written = written
        if self.slot is not None:
            self._restore_slot(self.slot, after)
        if after.state is not _EMPTY:
            with plain_attributes():
                for param in self.param_grads:
                    param.show()

    def _restore_slot(self, slot: GradSlot, after: GradSnapshot) -> None:
        """Bring a slot that units share to this unit's view of it. Only what concerns this unit is changed,
        so the order of units does not matter."""
        if after.is_tenant:
            slot.tenant = self
        if after.is_stager:
            slot.stager = self
        elif slot.stager is self:
            slot.stager = None
        if after.is_padded:
            slot.padding_of = self._layout_key
        elif slot.padding_of == self._layout_key:
            slot.padding_of = None

    # Gradients that forward makes

    def stage(self, param: ParamGrad) -> Staged | None:
        """The place for a gradient that forward makes, unless it is in use; see :mod:`param_grad`."""
        if param.flat.full_dtype != torch.float32:
            return None  # chunks must not be added up in the precision of the exchange
        if self.state is _OPEN or is_in_backward() or param.staged is not None:
            return None
        if not param.flat.has_own_full:
            self.take_user_changes()
            if self.state is not _EMPTY:
                return None
            self._prepare_main()
        elif not self._enter_slot_to_stage():
            return None
        return param.stage_in_place()

    def _enter_slot_to_stage(self) -> bool:
        slot = self.slot
        assert slot is not None
        for other in (slot.tenant, slot.stager):
            if other is not None and other is not self and (other.is_open or other.is_staged):
                return False
        if slot.tenant is not None:
            slot.tenant.guard.wait()
        if slot.padding_of != self._layout_key:
            slot.padding_of = None  # what is staged may lie in the last tenant's padding
        slot.stager = self
        return True

    # Inside

    def _enter_slot(self, slot: GradSlot) -> None:
        tenant = slot.tenant
        if tenant is not None and tenant is not self:
            if tenant.is_open:
                tenant.reduce(last=False)
            tenant.guard.wait()  # its reduction still reads the slot
        if slot.stager is not None and slot.stager is not self:
            # Before padding is cleared, which may lie in what they left.
            for param in slot.stager.param_grads:
                param.make_space()
            slot.stager = None
        if slot.padding_of != self._layout_key:
            slot.padding_of = self._layout_key
            for flat in self._flats:
                if flat.has_own_full:
                    flat.zero_padding()
        slot.tenant = self

    def _prepare_main(self) -> None:
        """Have a main gradient that may be overwritten."""
        self.guard.wait()  # it was dropped, but a reduction that was started before may still write it
        end_leases(self.param_grads)  # before anything is written there
        freed = [flat for flat in self._flats if flat.main is None]
        for flat in freed:
            flat.allocate()
        if freed:
            for param in self.param_grads:
                param.bind()

    def _make_zero(self) -> None:
        """A complete gradient of zeros, which backward adds to."""
        for flat in self._flats:
            flat.main.zero_()  # type: ignore[union-attr]
        for param in self.param_grads:
            param.written = True
        self._main_state = _FINAL
        self._transition(_FINAL)

    def _adopt(self, param: ParamGrad) -> None:
        """A user set ``parameter.grad``: backward adds to it, the optimizer steps with it."""
        if self.state in (_OPEN, _REDUCING, _BROKEN):
            raise RuntimeError(f"{param.name}.grad was set by hand, but {self._problems[self.state]}")
        if self._main_state is _EMPTY:
            self._prepare_main()
            for other in self.param_grads:
                other.make_space()  # what forward left in main for its backward must not be zeroed with it
            self._make_zero()
        param.adopt(1.0 if self._main_state is _FINAL else param.flat.partial_factor)

    def _start(self, stages: list[Stage], result: GradState) -> None:
        self._main_state = result
        self._transition(_REDUCING)
        for event in self._written_elsewhere:
            event.wait()
        self._written_elsewhere.clear()
        if stages:
            self._written.record()
            self._stream.run(self._handle, stages, self._written)
            # Whoever zeroes the gradient in place after a backward that raised must not be overtaken.
            self.guard.pending = self._handle

    def note_write(self, view: torch.Tensor) -> None:
        """Autograd has written into ``view``, on a GPU. It does so on the stream on which it first met the
        parameter: that of a capture, where a captured part is kept."""
        stream = torch.cuda.current_stream(view.device)
        if stream != torch.cuda.default_stream(view.device) and not is_capturing():
            self._written_elsewhere.append(stream.record_event())

    def _transition(self, state: GradState) -> None:
        if state not in MOVES[self.state]:
            raise AssertionError(f"{self.name}: a gradient went from {self.state.name} to {state.name}")
        self.state = state
        self.guard.problem = self._problems.get(state)


def _problems(name: str) -> dict[GradState, str]:
    """Why a gradient cannot be read, by its state."""
    incomplete = (
        f"the gradient of {name} is not complete: the last backward ran inside micro_batch(last=False), or "
        "after set_requires_gradient_sync(False); run the last micro-batch with last=True, or drop it with "
        "zero_grad()"
    )
    running = f"the gradient of {name} is not complete: its backward is under way, or raised"
    broken = (
        f"the gradient of {name} is not complete: the backward that was to make it raised; call zero_grad() "
        "on the model before the next one"
    )
    return {_OPEN: incomplete, _REDUCING: running, _PARTIAL: incomplete, _BROKEN: broken}
