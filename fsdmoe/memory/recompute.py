"""Parts of a layer whose results backward computes again instead of keeping them.

::

    normed = part("norms", norm, x)          x is kept (or comes from another part, or from the host)
    y = linear(normed)                       normed is saved by name only: its memory goes with its last user
    ...
    y.backward()                             linear's backward asks for normed: norm(x) runs again, once

A part keeps its arguments only. When backward asks for one of its results, or for a tensor that it saved
inside, the part runs again, up to the last tensor that is still needed. Each tensor is freed after its last
use in backward.

The second run gives the same bits: the same function of the same arguments, under the same autocast and, if
asked, the same random state. Integers (choices of experts) are always kept. A part must not exchange anything
between ranks, because the second run would exchange it again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fsdmoe.core.capturing import is_capturing
from fsdmoe.memory.layer_call import (
    LayerCall,
    Packed,
    as_current,
    current_call,
    enter,
    has_storage,
    packing,
    tensors_in,
    unpack,
)

Result = TypeVar("Result")


def part(name: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """``function(*args, **kwargs)``; a part of the layer that is run again in backward, if the layer
    recomputes ``name`` and this is not inside of another part."""
    call = _call_that_recomputes(name)
    return function(*args, **kwargs) if call is None else _Part(call, function, (args, kwargs)).run()


def drawing_part(name: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """``part`` for a function that may draw random numbers (dropout)."""
    call = _call_that_recomputes(name)
    if call is None:
        return function(*args, **kwargs)
    return _Part(call, function, (args, kwargs), draws=True).run()


def hand_out(*tensors: Tensor) -> None:
    """Inside of a part whose function goes on: the part ends here, with these results. What follows is as if
    it stood behind the part, and is not run again."""
    if not torch.compiler.is_compiling() and (end := getattr(_thread, "end", None)) is not None:
        end(tensors)


def _call_that_recomputes(name: str) -> LayerCall | None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    call = current_call()
    return call if call is not None and name in call.parts else None


_thread = threading.local()
"""``end``: how the part that this thread runs takes what is handed out."""


@contextlib.contextmanager
def _inside(end: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    before = getattr(_thread, "end", None)
    _thread.end = end
    try:
        with as_current(None):
            yield
    finally:
        _thread.end = before


class _Part:
    """One call of a part: its arguments, and who still wants what of a second run."""

    def __init__(
        self, call: LayerCall, function: Callable[..., Any], given: Any, *, draws: bool = False
    ) -> None:
        self._call: LayerCall | None = call
        self._is_over = False
        self._function = function
        self._given: Any = given
        self._inputs = _mapped(given, lambda leaf: _pack_input(call, leaf))
        tensors = list(tensors_in(given))
        self._own = {t.untyped_storage()._cdata for t in tensors if has_storage(t)}
        self._num_saved = 0
        self._inner: dict[int, weakref.ref[_Again]] = {}
        self._outer: dict[int, weakref.ref[_Again]] = {}
        self._around = _Surroundings(tensors, draws=draws)

    def run(self) -> Any:
        (args, kwargs), self._given = self._given, None
        call = self._call
        assert call is not None
        with _inside(self._end), packing(self._pack):
            result = self._function(*args, **kwargs)
        if not self._is_over:
            self._end(_results(result))
        self._call = None
        return result

    def _end(self, results: Sequence[Tensor]) -> None:
        call = self._call
        assert call is not None
        if self._is_over:
            return
        self._is_over = True
        enter(call)  # left again with the function
        for index, tensor in enumerate(results):
            is_own = tensor.untyped_storage()._cdata in self._own
            if is_own or call.is_known(tensor) or not tensor.is_floating_point():
                continue
            again = _Again(self)
            self._outer[index] = weakref.ref(again)
            call.offer(tensor, again)

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        """A number for everything that is saved, so that a second run finds it again; a promise only for
        what was made in here."""
        call = self._call
        assert call is not None
        if self._is_over:
            return call.pack(tensor)
        number, self._num_saved = self._num_saved, self._num_saved + 1
        if call.is_known(tensor) or not tensor.is_floating_point():
            return call.pack(tensor)
        if tensor.untyped_storage()._cdata in self._own:
            return call.pack(tensor)
        again = _Again(self)
        self._inner[number] = weakref.ref(again)
        return again

    def run_again(self) -> None:
        """Fill everything that somebody still waits for."""
        inner, outer = _waiting(self._inner), _waiting(self._outer)
        last = max(inner, default=-1) if not outer else None
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if count in inner:
                inner[count].fill(tensor.detach(), self._around)
            count += 1
            if last is not None and count > last:
                raise _Enough

        def end(results: Sequence[Tensor]) -> None:
            if count != self._num_saved:
                raise RuntimeError(
                    f"a part that is recomputed saved {count} tensors, and {self._num_saved} when it ran "
                    "first: what it computes must depend on its arguments alone"
                )
            for index, again in outer.items():
                again.fill(results[index].detach(), self._around)
            raise _Enough

        with self._around.restored(), torch.enable_grad(), contextlib.suppress(_Enough):
            # Arguments that come from elsewhere come to the stream of this run.
            args, kwargs = _mapped(self._inputs, _unpack_input)
            with _inside(end), saved_tensors_hooks(pack, _never):
                end(_results(self._function(*args, **kwargs)))
        self._around.note_end()


class _Enough(Exception):
    """Everything that is wanted of a second run is there."""


def _never(packed: object) -> Tensor:
    raise AssertionError("the graph of a second run has no backward of its own")


def _waiting(wanted: dict[int, weakref.ref[_Again]]) -> dict[int, _Again]:
    alive = {key: again for key, ref in wanted.items() if (again := ref()) is not None}
    return {key: again for key, again in alive.items() if again.is_waiting}


def _results(result: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(result) if has_storage(tensor)]


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A call's arguments with every leaf mapped, through tuples, lists and dicts. torch's own trees make a
    reference cycle a call."""
    if isinstance(value, tuple):
        items = [_mapped(each, function) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(each, function) for each in value]
    if type(value) is dict:
        return {key: _mapped(each, function) for key, each in value.items()}
    return function(value)


def _pack_input(call: LayerCall, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    return _Input(call.pack(leaf.detach()), leaf.requires_grad)


def _unpack_input(leaf: Any) -> Any:
    return leaf.again() if isinstance(leaf, _Input) else leaf


class _Input:
    """An argument as it is kept."""

    def __init__(self, packed: Tensor | Packed, requires_grad: bool) -> None:
        self._packed, self._requires_grad = packed, requires_grad

    def again(self) -> Tensor:
        return unpack(self._packed).detach().requires_grad_(self._requires_grad)


class _Again:
    """A tensor that a second run will give. It holds the part until then, and the tensor from then on, and
    goes with whoever holds it: autograd, until the node that reads it is done."""

    def __init__(self, source: _Part) -> None:
        self._part: _Part | None = source
        self._value: Tensor | None = None
        self._around: _Surroundings | None = None

    @property
    def is_waiting(self) -> bool:
        return self._value is None

    def fill(self, value: Tensor, around: _Surroundings) -> None:
        self._value, self._around = value, around
        self._part = None  # with the last of them go the arguments

    def fetch(self) -> Tensor:
        if self._part is not None:
            self._part.run_again()
        if self._value is None or self._around is None:
            raise AssertionError("expected the second run of a part to give what the first one gave")
        self._around.hand_over(self._value)
        return self._value

    unpack = fetch


class _Surroundings:
    """What a function reads apart from its arguments: stream, autocast, random state."""

    def __init__(self, tensors: Sequence[Tensor], *, draws: bool) -> None:
        """Those of now, on the device of these tensors."""
        device = self._device = tensors[0].device if tensors else torch.device("cpu")
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None
        self._done: torch.cuda.Event | None = None
        is_cast = torch.is_autocast_enabled(device.type)
        self._autocast = torch.get_autocast_dtype(device.type) if is_cast else None
        self._rng: tuple[Tensor, Tensor | None] | None = None
        if draws and not is_capturing():  # see fsdmoe.core.capturing
            self._rng = torch.get_rng_state(), torch.cuda.get_rng_state(device) if is_cuda else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            kind, dtype = self._device.type, self._autocast
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            if self._rng is not None:
                devices = [] if self._rng[1] is None else [self._device]
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self._rng[0])
                if self._rng[1] is not None:
                    torch.cuda.set_rng_state(self._rng[1], self._device)
            yield

    def note_end(self) -> None:
        """Note the end of a second run, for readers on other streams."""
        if self._stream is not None:
            self._done = self._stream.record_event()

    def hand_over(self, tensor: Tensor) -> None:
        """Let the current stream read what the function's own stream made."""
        if self._stream is None:
            return
        reader = torch.cuda.current_stream(self._device)
        if reader != self._stream:
            reader.wait_event(cast(torch.cuda.Event, self._done))
            tensor.record_stream(reader)
