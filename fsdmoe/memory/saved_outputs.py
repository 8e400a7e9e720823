"""Keep for backward how a cheap output is made, in place of the output, whoever saves it.

:mod:`fsdmoe.memory.recompute` frees an output between its last use in forward and its first in backward, in
layers that know both. Where a layer is somebody else's, nobody knows who reads the output of its norms. But
whatever backward needs passes autograd's saving, where it can be recognised by its memory::

    with remade_outputs():                                   # around the layer's forward
        y = layer(x)                                         # in it: out = norm(x)
                                                             #        note_output(out, lambda: norm(x))

Operations that save ``out``, or a view of it, save how to make it instead; the first that reads it in
backward makes it, the last one lets go of it. An output that is also kept elsewhere (as a residual, in a
user's hook) is simply kept there: nothing is freed under anybody.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdmoe.memory.recompute import may_discard

Make = Callable[[], Tensor]
_open: _Scope | None = None


class _Remade:
    """An output that is made again for its readers in backward."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._num_saved = self._num_read = 0
        self._value: Tensor | None = None

    def saved(self) -> None:
        self._num_saved += 1

    def read(self) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._make()
        value, self._num_read = self._value, self._num_read + 1
        if self._num_read >= self._num_saved:
            self._value, self._num_read = None, 0  # a second backward through the graph makes it once more
        return value


class _View(NamedTuple):
    """What was saved: a view of an output."""

    output: _Remade
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make(self) -> Tensor:
        return self.output.read().as_strided(self.size, self.stride, self.offset)


class _Noted(NamedTuple):
    tensor: Tensor
    """Held until the layer's forward is over: its memory must not become another tensor's before."""
    version: int
    output: _Remade


class _Scope:
    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}

    def note(self, out: Tensor, make: Make) -> None:
        self._noted[out.untyped_storage().data_ptr()] = _Noted(out, out._version, _Remade(make))

    def close(self) -> None:
        """Let go of all outputs: the graph keeps its hooks, and this with them."""
        self._noted.clear()

    def view_of(self, tensor: Tensor) -> _View | None:
        """What ``tensor`` is of an output, unless that was changed in place since."""
        if type(tensor) is not Tensor:
            return None
        noted = self._noted.get(tensor.untyped_storage().data_ptr())
        if noted is None or tensor._version != noted.version or tensor.dtype != noted.tensor.dtype:
            return None
        return _View(noted.output, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def pack(self, tensor: Tensor) -> Any:
        found = self.view_of(tensor)
        if found is None:
            # An output that its own operation saves would keep that alive, and that the output.
            return tensor if tensor.grad_fn is None else tensor.detach()
        found.output.saved()
        return found


def _unpack(packed: Any) -> Tensor:
    return packed.make() if isinstance(packed, _View) else packed


@contextlib.contextmanager
def remade_outputs() -> Iterator[None]:
    """Around a forward. Nothing is made again in a forward that is itself run again, in evaluation, or where
    somebody else decides what is saved (a checkpoint around it, the debug mode of sharding)."""
    global _open
    if not may_discard() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield
        return
    before, scope = _open, _Scope()
    _open = scope
    try:
        with saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _open = before
        scope.close()


def with_remade_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` inside of :func:`remade_outputs`."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with remade_outputs():
            return forward(*args, **kwargs)

    return wrapped


def note_output(out: Tensor, make: Make) -> None:
    """Where outputs are remade: ``make()`` gives a tensor like ``out``, whose memory is all its own."""
    if _open is not None and out.requires_grad:
        _open.note(out, make)


def how_to_make(tensor: Tensor) -> Make | None:
    """How to make ``tensor`` again, if it is a view of an output that is remade."""
    found = None if _open is None else _open.view_of(tensor)
    return None if found is None else found.make
