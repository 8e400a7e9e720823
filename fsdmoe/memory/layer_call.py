"""One forward of one layer, and what happens to every tensor that autograd saves in it.

::

    autograd saves t  --pack-->  a weight, or a tensor nothing was said about:   kept, as without us
                                 the result of a part that is recomputed:        a note where it comes from
                                 a named activation that is offloaded:           a note where it is
    backward wants t  --unpack->  the tensor, the part run again, or the copy brought back

A tensor is identified by its storage, so its views (transposes, rows, heads) are recognised too. Weights are
views of buffers that hold another layer's weights in backward: they are recognised first and never touched.

Nothing here belongs to a module. While a layer's forward runs, parts and names find its call in the thread
that runs it. Outside of such a call every function here is a plain call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fsdmoe.core.autograd import is_in_backward

Result = TypeVar("Result")


class Packed(Protocol):
    """What autograd holds in place of a tensor."""

    def unpack(self) -> Tensor: ...


class Source(Protocol):
    """Where a storage that is not kept comes from in backward."""

    def fetch(self) -> Tensor:
        """A tensor that has the storage, on the current stream."""
        ...


class Mover(Protocol):
    """Takes named activations off the device."""

    def take(self, names: Iterable[str], tensor: Tensor) -> Source | None:
        """A place from which the storage of a tensor with these names can be fetched; None: it stays."""
        ...


_thread = threading.local()


def current_call() -> LayerCall | None:
    """The call whose forward this thread runs; None outside, and while a part of it runs."""
    return getattr(_thread, "call", None)


def enter(call: LayerCall | None) -> None:
    """Set what :func:`current_call` says, until the block around ends that set it before."""
    _thread.call = call


@contextlib.contextmanager
def as_current(call: LayerCall | None) -> Iterator[None]:
    """Set what :func:`current_call` says in this block."""
    before = current_call()
    enter(call)
    try:
        yield
    finally:
        enter(before)


def may_keep_less() -> bool:
    """Whether this forward's own tensors are what backward will read: not in evaluation, not while compiling,
    and not under a checkpoint, which makes all of it again."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and not is_in_backward()
        and getattr((_hooks_around() or (None,))[0], "__module__", None) != "torch.utils.checkpoint"
    )


def _hooks_around() -> tuple[Any, Any] | None:
    """Pack and unpack of whoever stands around the layer."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def name_activation(name: str, tensor: Tensor) -> None:
    """Say what ``tensor`` is, for whoever decides about it once it is saved."""
    if not torch.compiler.is_compiling() and (call := current_call()) is not None:
        call.name(name, tensor)


def saving_as(name: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """``function(*args, **kwargs)``; what it saves and nobody named has this name."""
    call = None if torch.compiler.is_compiling() else current_call()
    if call is None:
        return function(*args, **kwargs)
    before, call.scope = call.scope, name
    try:
        return function(*args, **kwargs)
    finally:
        call.scope = before


@contextlib.contextmanager
def packing(pack: Callable[[Tensor], Any]) -> Iterator[None]:
    """What autograd saves in this block goes through ``pack``."""
    cell = [pack]  # emptied: autograd keeps a hook as long as the graph, and would keep all that it knows
    with saved_tensors_hooks(lambda tensor: cell[0](tensor), unpack):
        try:
            yield
        finally:
            cell.clear()


class LayerCall:
    """See the module's text."""

    def __init__(self, parts: frozenset[str], kept: Iterable[Tensor], mover: Mover | None = None) -> None:
        """``parts`` are recomputed. ``kept``: weights, and whatever else belongs to others and stays."""
        self.parts = parts
        self.scope: str | None = None
        self._kept = {_key(tensor) for tensor in kept if has_storage(tensor)}
        self._mover = mover
        self._names: dict[int, tuple[StorageWeakRef, list[str]]] = {}
        self._stays: dict[int, StorageWeakRef] = {}
        self._sources: dict[int, tuple[StorageWeakRef, int, Source]] = {}
        """With the version that the storage had: one that was written to since is another."""
        self._outer = _hooks_around()
        """They see what is kept, as without us."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The layer's forward is in this block."""
        with as_current(self), packing(self.pack):
            yield

    def is_known(self, tensor: Tensor) -> bool:
        """Whether it is a weight, belongs to somebody else, or something was said about it before."""
        if not has_storage(tensor):
            return True
        key = _key(tensor)
        return key in self._kept or key in self._sources

    def name(self, name: str, tensor: Tensor) -> None:
        if self._mover is not None and has_storage(tensor):
            storage = tensor.untyped_storage()
            # The weak reference also keeps the address from being used again.
            self._names.setdefault(storage._cdata, (StorageWeakRef(storage), []))[1].append(name)

    def offer(self, tensor: Tensor, source: Source) -> None:
        """From now on, what is saved of this storage is fetched from ``source``."""
        storage = tensor.untyped_storage()
        self._sources[storage._cdata] = (StorageWeakRef(storage), tensor._version, source)

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        if not has_storage(tensor) or (key := _key(tensor)) in self._kept:
            return self._keep(tensor)
        found = self._sources.get(key)
        if found is not None:
            _, version, source = found
            return _View(source, tensor) if version == tensor._version else self._keep(tensor)
        if self._mover is not None and self._may_leave(tensor):
            unnamed = [] if self.scope is None else [self.scope]
            _, names = self._names.get(key, (None, unnamed))
            moved = self._mover.take(names, tensor)
            if moved is not None:
                self.offer(tensor, moved)
                return _View(moved, tensor)
            # Whatever name it gets later, it is kept already.
            self._stays[key] = StorageWeakRef(tensor.untyped_storage())
        return self._keep(tensor)

    def _may_leave(self, tensor: Tensor) -> bool:
        """Numbers of eight bits are codes of weights, not activations."""
        return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and _key(tensor) not in self._stays

    def _keep(self, tensor: Tensor) -> Tensor | Packed:
        return _Kept(tensor, self._outer)


class _Kept:
    """A tensor that stays, passed through the hooks around the layer."""

    def __init__(self, tensor: Tensor, outer: tuple[Any, Any] | None) -> None:
        self._version = tensor._version
        # Without its history: what a node holds of its own result must not lead back to the node.
        self._packed: Any = tensor.detach() if outer is None else outer[0](tensor)
        self._unpack = None if outer is None else outer[1]

    def unpack(self) -> Tensor:
        tensor: Tensor = self._packed if self._unpack is None else self._unpack(self._packed)
        if tensor._version != self._version:  # as autograd would say, which does not look behind hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
                f"operation: it is at version {tensor._version}, expected version {self._version}"
            )
        return tensor


class _View:
    """A tensor by its place in a storage that is elsewhere."""

    def __init__(self, source: Source, tensor: Tensor) -> None:
        self._source = source
        self._place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self._nbytes = tensor.dtype, tensor.untyped_storage().nbytes()

    def unpack(self) -> Tensor:
        found = self._source.fetch()
        storage = found.untyped_storage()
        if storage.nbytes() != self._nbytes:
            raise AssertionError(f"expected {self._nbytes} bytes again, got {storage.nbytes()}")
        return torch.empty(0, dtype=self._dtype, device=found.device).set_(storage, *self._place)


def unpack(packed: Tensor | Packed) -> Tensor:
    """The tensor that :meth:`LayerCall.pack` was given."""
    return packed if isinstance(packed, Tensor) else packed.unpack()


def has_storage(tensor: Tensor) -> bool:
    """Whether it is a plain tensor; wrappers (``DTensor``) have no memory of their own."""
    return type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__")


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Of a call's arguments or results: through tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each, depth - 1)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()), depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(list(vars(value).values()), depth)
