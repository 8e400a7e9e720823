"""The sharded view of a parameter: a tensor with its global shape that holds one rank's flat piece of it.

Two cuts stand between the global tensor and what a rank holds. The mesh axes of the placement (TP, EP,
ETP) cut out the *local* tensor that a module computes with; then the shard axis gives each rank a flat
range of it::

    global [E, 2I, H]  --placement-->  local [E/ep, 2, I/etp, H]  --shard axis-->  local.flatten()[start:end]

so pieces are ragged, and may be empty. The piece is a view of a flat buffer that someone else owns (the
sharding engine): writing through the ``ShardedTensor`` writes the buffer and the other way round.

What works, and on what terms:

=================================  ==========================================================================
element-wise ops, ``_foreach_*``,  on the pieces, no communication; all operands must have the same layout or
``_fused_*`` optimizer steps       be scalars; the result is a ``ShardedTensor`` of that layout
``copy_`` from a plain tensor      of the global shape: every rank takes its boxes
``copy_`` from a ``DTensor``       collective: all ranks must call
``full_tensor``, ``vector_norm``   collective: all ranks of the shard axis and of the splitting axes must call
DTensor's own methods              see :mod:`fsdmoe.fsdp.dtensor_manners`
everything else                    refused: an index or a reduction of a piece is not that of the tensor
=================================  ==========================================================================
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from fsdmoe.core.boxes import Box
from fsdmoe.core.placement import Placement
from fsdmoe.fsdp.access import Access, ReadGuard
from fsdmoe.fsdp.dtensor_manners import DTensorManners, piece_of_dtensor
from fsdmoe.fsdp.global_norm import global_norms
from fsdmoe.fsdp.shard_layout import ShardLayout, gather_whole
from fsdmoe.mesh import Axis, Meshes

aten = torch.ops.aten

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default}
_NEW = {aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default,
        aten.new_empty_strided.default}  # fmt: skip
_ALIAS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_POINTWISE_UNTAGGED = {
    aten._to_copy.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.masked_fill_.Scalar,
}  # fmt: skip
_ZERO = {aten.zero_.default, aten._foreach_zero_.default}
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_WHOLE_STATE = (
    " (torchao's low-bit optimizers, AdamW8bit and its like, make states of whole parameters, in blocks that "
    "pieces of any length cut: take fsdmoe.AdamW(model, moment_dtype='torchao_8bit') with granule_size = 256 "
    "in the fsdp section, which makes the same numbers)"
)
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


class ShardedTensor(DTensorManners, torch.Tensor):
    """One rank's flat piece of a global tensor, with the global shape.

    Element-wise operations work on the piece; what would depend on the layout is refused. ``full_tensor()``
    gives the whole.
    """

    _piece: torch.Tensor
    _layout: ShardLayout
    access: Access

    @staticmethod
    def __new__(
        cls, piece: torch.Tensor, placement: Placement, start: int, end: int, meshes: Meshes, shard_axis: Axis
    ) -> ShardedTensor:
        """Wrap ``piece``: elements ``[start, end)`` of the flattened local tensor at this rank."""
        return _wrap(piece, ShardLayout(placement, start, end, meshes, shard_axis))

    def __init__(self, *_: Any) -> None:
        pass  # all is done in __new__, which also serves results of operations

    @property
    def piece(self) -> torch.Tensor:
        """The 1-D tensor of this rank's elements: a view of the buffer it was made from, never a copy."""
        problem = self.access.problem
        if problem is not None:
            raise RuntimeError(problem)
        return self._piece

    @property
    def placement(self) -> Placement:
        """How TP or EP split the global tensor before it was sharded."""
        return self._layout.placement

    @property
    def start(self) -> int:
        """First element of the piece in the flattened local tensor."""
        return self._layout.start

    @property
    def end(self) -> int:
        return self._layout.end

    @property
    def meshes(self) -> Meshes:
        return self._layout.meshes

    @property
    def shard_axis(self) -> Axis:
        return self._layout.shard_axis

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Which boxes of the global tensor the piece holds, and where in the piece each lies."""
        return self._layout.boxes

    @staticmethod
    def around(piece: torch.Tensor, layout: ShardLayout, guard: ReadGuard) -> ShardedTensor:
        """The tensor of this layout whose elements are ``piece``, which can be read when ``guard`` allows
        it."""
        return _wrap(piece, layout, Access(guard))

    def with_piece(self, piece: torch.Tensor, guard: ReadGuard | None = None) -> ShardedTensor:
        """Another tensor with the layout of this one, around ``piece``: a gradient, a moment; any dtype."""
        return _wrap(piece, self._layout, Access(guard))

    def same_layout(self, other: ShardedTensor) -> bool:
        return self._layout == other._layout

    @torch.no_grad()
    def full_tensor(self) -> torch.Tensor:
        """The whole global tensor, on every rank. Collective over the shard axis and the splitting axes."""
        return gather_whole(self.piece, self._layout)

    @classmethod
    def from_dtensor(cls, source: DTensor, like: ShardedTensor) -> ShardedTensor:
        """A tensor with the values of ``source`` and the layout of ``like``. Collective over all ranks.

        ``like.copy_(source)`` writes the values into ``like`` itself.
        """
        return _wrap(piece_of_dtensor(source, like._layout), like._layout)

    def register_hook(self, hook: object) -> NoReturn:
        raise NotImplementedError(
            "hooks on the gradient of a sharded tensor would never be called: backward writes gradients into "
            "the buffers that are reduced, and they are complete when it returns; read or change .grad then"
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """``hook(parameter)`` once its gradient is complete: at the end of a step's last backward, in the
        order of registration (torchao's ``CPUOffloadOptimizer`` copies it to the host then)."""
        engine = self.access.engine
        if engine is None:
            raise NotImplementedError("hooks for accumulated gradients are for parameters of a sharded model")
        handle = RemovableHandle(engine.grad_hooks)
        engine.grad_hooks[handle.id] = self, hook
        return handle

    def __repr__(self, *, tensor_contents: object = None) -> str:
        values = f"<{self.access.problem}>" if self.access.problem else self._piece
        return (
            f"ShardedTensor(local_tensor={values}, shape={tuple(self.shape)}, "
            f"device_mesh={self.device_mesh}, placements={self.placements}"
            f"{', requires_grad=True' if self.requires_grad else ''})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def describe(self) -> str:
        """What it is, without values, for messages."""
        layout = self._layout
        splits = ", ".join(f"{axis} on {dim}" for axis, dim in layout.placement.splits) or "no axis"
        meshes, axis = layout.meshes, layout.shard_axis
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"holds [{layout.start}, {layout.end}) of local {layout.local_shape} in {len(layout.boxes)} "
            f"boxes, {layout.placement.mesh} mesh split by {splits}, "
            f"{axis} rank {meshes.rank(axis)} of {meshes.size(axis)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if not self.is_leaf:
            raise RuntimeError("only leaves of the graph can be copied; detach() first")
        copied: Any = self.with_piece(self.piece.clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a ShardedTensor holds only this rank's piece of {tuple(self.shape)} and cannot be pickled; "
            "save it with fsdmoe.checkpoint.save or torch.distributed.checkpoint, or pickle full_tensor()"
        )

    # What stock dcp.save, dcp.async_save and dcp.load ask of a tensor

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._piece)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Asked for by a load, which writes the boxes later; of every rank, so that all count alike, also
        # those that hold no box.
        self.access.writes += 1
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if not self.shape.numel():
            return self._piece.view(self.shape)
        for box in self.boxes:
            if index.offset is not None and box.offsets == tuple(index.offset):
                return box.view_of(self.piece)
        raise ValueError(f"this rank holds no box at {index.offset} of {index.fqn}")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        if not self.shape.numel():  # no rank holds a box, but the name must reach the checkpoint
            return [ChunkStorageMetadata(torch.Size([0] * len(self.shape)), self.shape)]
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    # What torch asks of a tensor subclass

    def __tensor_flatten__(self) -> tuple[list[str], ShardLayout]:
        return ["_piece"], self._layout

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], layout: ShardLayout, *_: Any) -> ShardedTensor:
        return _wrap(inner["_piece"], layout)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func == _SET_DATA:
            return _set_data(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class Lease:
    """The owner of memory remembers by it, weakly, a tensor that was shown there and that a user may have
    kept."""

    def __init__(self, tensor: weakref.ref[ShardedTensor], access: Access) -> None:
        """``access`` is shared by the tensor and its aliases."""
        self._tensor = tensor
        self.access = access

    def end(self, piece: torch.Tensor, why: str) -> None:
        """``piece`` is about to serve something else. A tensor that was kept takes a copy of its values
        along; its aliases cannot be read any more, for the reason ``why``."""
        kept = self._tensor()
        problem = self.access.problem  # one that stands goes along with the copy
        self.access.expired = why
        if kept is not None:
            kept._fix_weakref()  # type: ignore[attr-defined]  # as torch asks of who follows a weak reference
            kept.access = Access()
            kept.access.expired = problem
            if kept._piece is piece:  # a user may have put other memory behind it (`p.grad.data = ...`)
                kept._piece = piece.clone()


plain_attributes = torch._C.DisableTorchFunctionSubclass
"""A context in which attributes of sharded tensors (``grad``, ``_version``) are read and set without
``__torch_function__``, which costs ten times the access; not for ``data``, nor for operations."""


def _wrap(piece: torch.Tensor, layout: ShardLayout, access: Access | None = None) -> ShardedTensor:
    if piece.dim() != 1 or piece.numel() != layout.end - layout.start or not piece.is_contiguous():
        raise AssertionError(
            f"expected a contiguous 1-D piece of {layout.end - layout.start} elements, "
            f"got shape {tuple(piece.shape)} with strides {piece.stride()}"
        )
    made = torch.Tensor._make_wrapper_subclass(
        ShardedTensor, layout.placement.global_shape, dtype=piece.dtype, device=piece.device
    )
    made._piece = piece.detach() if piece.requires_grad else piece
    made._layout = layout
    made.access = access or Access()
    return made


def _set_data(target: ShardedTensor, source: torch.Tensor) -> None:
    """``target.data = source``: torch would exchange the shell and leave the old piece inside."""
    if not isinstance(target, ShardedTensor) or not isinstance(source, ShardedTensor):
        raise RuntimeError("`.data`: only one ShardedTensor can stand in for another; use copy_ for values")
    if not target.same_layout(source) or target.dtype != source.dtype or target.device != source.device:
        raise RuntimeError(
            f"`.data` needs the same layout, dtype and device: {target.describe()} against "
            f"{source.describe()}"
        )
    target._piece = source._piece


def _dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    result = _run(func, args, kwargs)
    if func._schema.is_mutable:
        given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_flatten(given.get(argument.name))[0]:
                    if isinstance(leaf, ShardedTensor):
                        leaf.access.writes += 1
    return result


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    if func in _ALIAS or (func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
        return _wrap(args[0]._piece, args[0]._layout, args[0].access)
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func in _ZERO:
        for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
            tensor.access.is_zeroed |= tensor.access.problem is not None
    if func in _LIKE or func in _NEW:
        return _make_alike(func, args, kwargs)
    if func is aten.linalg_vector_norm.default:
        return _vector_norm(func, *args, **kwargs)
    if func is aten.any.default:  # initialisers that draw again ask it
        return global_norms([args[0].piece.float()], [args[0]._layout], torch.inf, None)[0] > 0
    if name in _FUSED or (name.startswith("_foreach_") and name.rstrip("_") not in _FOREACH_REDUCTIONS):
        return _run_lists(func, args, kwargs)
    if func is aten._foreach_norm.Scalar:
        return _foreach_norm(*args, **kwargs)
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random and func._schema.is_mutable and args[0]._layout.draws is not None:
        return _draw(func, *args, **kwargs)
    if (torch.Tag.pointwise in func.tags and not random) or func in _POINTWISE_UNTAGGED:
        return _run_pointwise(func, args, kwargs)
    return _refuse(
        func, "its values would depend on the layout" if random else "it is not element by element"
    )


def _draw(func: Any, target: ShardedTensor, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    """Random values in place: all ranks draw the whole tensor alike, and each keeps its piece."""
    whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    func(whole, *args, generator=generator or target._layout.draws, **kwargs)
    return _copy(target, whole)


def _refuse(func: Any, why: str) -> NoReturn:
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        raise NotImplementedError(
            "torch.amp.GradScaler on sharded gradients: every rank would judge its own piece alone, and some "
            "would skip a step that others take. Take fsdmoe.LossScaler with fsdmoe.clip_grad_norm(model, "
            "max_norm, scaler), or bfloat16, which needs no scaler"
        )
    if optimizer := _optimizer_at_work():
        raise NotImplementedError(
            f"{optimizer} needs {func}, which a ShardedTensor does not have: {why}. Take an optimizer whose "
            "update is element by element, such as AdamW or SGD"
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise NotImplementedError(
            f"{func} on a ShardedTensor: {why}. Initialise before fully_shard, or after to_empty() of a "
            "model on the meta device; elsewhere draw the whole tensor, alike on all ranks, and "
            "parameter.copy_ it"
        )
    raise NotImplementedError(
        f"{func} on a ShardedTensor: {why}. A sharded parameter has whole values only inside its module's "
        "forward; elsewhere use element-wise operations, `.piece` and `.boxes`, or `full_tensor()`"
    )


def _optimizer_at_work() -> str | None:
    """The optimizer whose step calls this, by its class: torch's functions do not name it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer):
            return type(caller).__qualname__
        frame = frame.f_back
    return None


def _run_pointwise(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, {k: v for k, v in kwargs.items() if k != "memory_format"}))
    sharded = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    layout = _common_layout(func, leaves)
    call_args, call_kwargs = tree_unflatten([_piece_of(leaf) for leaf in leaves], spec)
    result = func(*call_args, **call_kwargs)
    if func._schema.is_mutable:
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return value  # in-place: the caller's own tensor
        return next(kwargs[a.name] for a in func._schema.arguments if a.alias_info and a.name in kwargs)
    if not isinstance(result, torch.Tensor) or result.shape != sharded[0]._piece.shape:
        _refuse(func, "its result has another shape than its operands")
    return _wrap(result, layout)


def _run_lists(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``_foreach_*`` and ``_fused_*``: element i of every list belongs together."""
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple)) and arg]
    lists = [arg for arg in lists if isinstance(arg[0], torch.Tensor)]
    for together in zip(*lists, strict=False):
        _common_layout(func, together)
    leaves, spec = tree_flatten((args, kwargs))
    call_args, call_kwargs = tree_unflatten([_piece_of(leaf) for leaf in leaves], spec)
    result = func(*call_args, **call_kwargs)
    if result is None or func._schema.is_mutable:
        return args[0] if result is not None else None
    return [x if type(like) is torch.Tensor else _wrap(x, like._layout) for x, like in zip(result, lists[0])]


def _common_layout(func: Any, leaves: Sequence[Any]) -> ShardLayout:
    sharded = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        if isinstance(leaf, ShardedTensor):
            if not leaf.same_layout(sharded[0]):
                _refuse(
                    func, f"operands are laid out differently, {sharded[0].describe()} and {leaf.describe()}"
                )
        elif sharded and leaf.dim() > 0:
            why = f"a plain tensor of shape {tuple(leaf.shape)} cannot be matched with a piece"
            _refuse(func, why + (_WHOLE_STATE if leaf.shape == sharded[0].shape else ""))
        elif sharded and sharded[0].dim() == 0 and leaf.dtype != sharded[0].dtype:
            _refuse(func, "a scalar of another dtype would promote a piece differently from a 0-dim tensor")
    return sharded[0]._layout if sharded else None  # type: ignore[return-value]


def _piece_of(leaf: Any) -> Any:
    return leaf.piece if isinstance(leaf, ShardedTensor) else leaf


def _make_alike(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    model, rest = args[0], args[1:]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout")}
    if func in _NEW:
        if tuple(rest[0]) != tuple(model.shape):
            like = torch.empty(0, dtype=model.dtype, device=model.device)
            return func(like, *rest, **kwargs)  # another shape: an ordinary tensor, as new_* promises
        if func is aten.new_empty_strided.default:
            func, rest = aten.new_empty.default, rest[:1]
        rest = (model._piece.shape, *rest[1:])
    return _wrap(func(model._piece, *rest, **kwargs), model._layout)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, ShardedTensor):
        _refuse(aten.copy_.default, "a plain tensor cannot take a piece")
    if isinstance(source, ShardedTensor):
        _common_layout(aten.copy_.default, (target, source))
        target.piece.copy_(source.piece, non_blocking)
    elif isinstance(source, DTensor):
        target.piece.copy_(piece_of_dtensor(source, target._layout), non_blocking)
    elif source.shape == target.shape:
        for box in target.boxes:
            box.view_of(target.piece).copy_(box.slice_of(source), non_blocking)
    else:
        _refuse(aten.copy_.default, f"shape {tuple(source.shape)} is not the global {tuple(target.shape)}")
    return target


def _vector_norm(
    func: Any,
    tensor: ShardedTensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> torch.Tensor:
    if dim is not None or keepdim:
        _refuse(func, "a norm along a dim needs whole rows")
    return global_norms([tensor.piece], [tensor._layout], ord, dtype)[0]


def _foreach_norm(tensors: Sequence[ShardedTensor], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    return global_norms([x.piece for x in tensors], [x._layout for x in tensors], ord, dtype)
