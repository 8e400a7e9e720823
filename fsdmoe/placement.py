"""Where a parameter's elements live: how mesh axes split it, and which boxes of the global tensor a rank
holds.

A *placement* says how a global tensor is cut into the local tensor that a rank's module computes with. Cuts
are made on a factored view of the global shape, because a fused ``gate_up [E, 2I, H]`` must give every rank
its share of the gates *and* of the ups::

    global [E, 2I, H]  --view-->  [E, 2, I, H]  --ep on dim 0, etp on dim 2-->  local [E/ep, 2, I/etp, H]

Sharding then gives a rank any flat range of that local tensor. A *box* is a hyper-rectangle of the global
tensor together with the strides at which its elements lie in such a flat range; boxes are what checkpoints
store, what ``full_tensor`` assembles, and the only description that survives a change of layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from fsdmoe.errors import ConfigError
from fsdmoe.mesh import Axis

Shape = tuple[int, ...]


class Coordinates(Protocol):
    """What a placement needs of the meshes; :class:`fsdmoe.mesh.Meshes` is one."""

    def size(self, axis: Axis) -> int: ...

    def rank(self, axis: Axis) -> int: ...


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a global tensor and where its elements lie in a flat local piece."""

    offsets: Shape
    """First global index along each dim."""
    sizes: Shape
    start: int
    """Position of the first element in the flat piece."""
    strides: Shape
    """Strides of the box's elements in the flat piece."""

    def view_of(self, piece: torch.Tensor) -> torch.Tensor:
        """The box as a (possibly strided) view of the flat, contiguous piece it was computed for."""
        return piece.as_strided(self.sizes, self.strides, piece.storage_offset() + self.start)

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same box as a view of the whole global tensor."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Placement:
    """How the axes of one mesh cut one parameter; see the module's drawing."""

    mesh: Literal["dense", "expert"]
    """Which mesh's remaining axes shard what this placement leaves: dense axes or ``edp``."""
    global_shape: Shape
    view_shape: Shape
    """The global shape with some dims factored; equal to it for most parameters."""
    splits: tuple[tuple[Axis, int], ...] = ()
    """Pairs (axis, dim of the view); an axis of size 1 may be named."""

    def __post_init__(self) -> None:
        _factor(self.global_shape, self.view_shape)
        dims = [dim for _, dim in self.splits]
        if len(set(dims)) != len(dims) or any(not 0 <= dim < len(self.view_shape) for dim in dims):
            raise AssertionError(
                f"expected distinct dims of a {len(self.view_shape)}-dim view, got splits {self.splits}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Placement:
        """A dense parameter that no axis splits."""
        return cls("dense", tuple(shape), tuple(shape))

    def splits_over(self, axis: Axis) -> bool:
        return any(axis == name for name, _ in self.splits)

    def local_view_shape(self, at: Coordinates) -> Shape:
        shape = list(self.view_shape)
        for axis, dim in self.splits:
            if shape[dim] % at.size(axis):
                raise ConfigError(
                    f"mesh.{axis}: {at.size(axis)} ranks cannot split dim {dim} of {self.view_shape} evenly; "
                    f"choose a divisor of {shape[dim]}"
                )
            shape[dim] //= at.size(axis)
        return tuple(shape)

    def local_shape(self, at: Coordinates) -> Shape:
        """The shape that a rank's module computes with: the local view, folded back to the global number of
        dims."""
        view, shape = self.local_view_shape(at), []
        for dims in _factor(self.global_shape, self.view_shape):
            shape.append(math.prod(view[d] for d in dims))
        return tuple(shape)

    def boxes(self, at: Coordinates, start: int = 0, end: int | None = None) -> list[Box]:
        """Boxes of the global tensor that the flat range ``[start, end)`` of the local tensor holds at rank
        ``at``."""
        local = self.local_view_shape(at)
        origin = [0] * len(local)
        for axis, dim in self.splits:
            origin[dim] = at.rank(axis) * local[dim]
        factors = _factor(self.global_shape, self.view_shape)
        strides = contiguous_strides(local)
        found = []
        for low, sizes in range_boxes(local, start, math.prod(local) if end is None else end):
            first = sum(o * s for o, s in zip(low, strides, strict=True)) - start
            view_low = [o + base for o, base in zip(low, origin, strict=True)]
            runs = [_runs(self.view_shape, dims, view_low, sizes, strides) for dims in factors]
            for choice in itertools.product(*runs):
                found.append(
                    Box(
                        offsets=tuple(run.offset for run in choice),
                        sizes=tuple(run.size for run in choice),
                        start=first + sum(run.skip for run in choice),
                        strides=tuple(run.stride for run in choice),
                    )
                )
        return found


def set_placement(parameter: nn.Parameter, placement: Placement) -> None:
    """Let ``parameter`` (the local tensor) say where it stands in the global one."""
    parameter.placement = placement  # type: ignore[attr-defined]


def placement_of(parameter: torch.Tensor) -> Placement:
    """The placement that was set, or that of a whole dense parameter."""
    placement = getattr(parameter, "placement", None)
    return Placement.whole(parameter.shape) if placement is None else placement


def local_slice(whole: torch.Tensor, placement: Placement, at: Coordinates) -> torch.Tensor:
    """A copy of rank ``at``'s part of a whole tensor (on meta: only its shape)."""
    local_shape = placement.local_shape(at)
    if whole.is_meta:
        return torch.empty(local_shape, dtype=whole.dtype, device="meta")
    view = whole.view(placement.view_shape)
    for axis, dim in placement.splits:
        view = view.chunk(at.size(axis), dim)[at.rank(axis)]
    return view.reshape(local_shape).clone(memory_format=torch.contiguous_format)


def split_parameter(whole: nn.Parameter, placement: Placement, at: Coordinates) -> nn.Parameter:
    """Rank ``at``'s part of a whole parameter, carrying its placement in it."""
    local = nn.Parameter(local_slice(whole.detach(), placement, at), requires_grad=whole.requires_grad)
    set_placement(local, placement)
    return local


def contiguous_strides(shape: Sequence[int]) -> Shape:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def range_boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut the flat range ``[start, end)`` of a row-major tensor into at most ``2*ndim - 1`` boxes (offsets,
    sizes)."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(end, row)
    if first == last or (first + 1 == last and tail == 0 and head):
        for offsets, sizes in range_boxes(shape[1:], head, tail or row):
            yield (first, *offsets), (1, *sizes)
        return
    if head:
        for offsets, sizes in range_boxes(shape[1:], head, row):
            yield (first, *offsets), (1, *sizes)
        first += 1
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in range_boxes(shape[1:], 0, tail):
        yield (last, *offsets), (1, *sizes)


@dataclass(frozen=True)
class _Run:
    """A contiguous stretch of one global dim: where it starts, and where its first element lies locally."""

    offset: int
    size: int
    skip: int
    stride: int


def _runs(view: Shape, dims: Sequence[int], low: Sequence[int], sizes: Shape, strides: Shape) -> list[_Run]:
    """The view-box's extent over the view dims ``dims`` of one global dim, as contiguous stretches of that
    dim."""
    if not dims:
        return [_Run(0, 1, 0, 1)]
    inner = len(dims) - 1  # dims after `inner` are whole, so stretches along dims[inner] are contiguous
    while inner > 0 and sizes[dims[inner]] == view[dims[inner]]:
        inner -= 1
    unit = math.prod(view[d] for d in dims[inner + 1 :])
    found = []
    for index in itertools.product(*(range(sizes[d]) for d in dims[:inner])):
        outer = 0
        for d, i in zip(dims[:inner], index, strict=True):
            outer = outer * view[d] + low[d] + i
        found.append(
            _Run(
                offset=(outer * view[dims[inner]] + low[dims[inner]]) * unit,
                size=sizes[dims[inner]] * unit,
                skip=sum(i * strides[d] for d, i in zip(dims[:inner], index, strict=True)),
                stride=strides[dims[-1]],
            )
        )
    return found


def _factor(shape: Shape, view: Shape) -> list[list[int]]:
    """Which consecutive view dims make up each global dim."""
    factors, at = [], 0
    for size in shape:
        dims, product = [at], view[at] if at < len(view) else 0
        at += 1
        while product < size and at < len(view):
            product *= view[at]
            dims.append(at)
            at += 1
        if product != size:
            raise AssertionError(f"expected a factoring of {shape}, got {view}")
        factors.append(dims)
    if any(size != 1 for size in view[at:]):
        raise AssertionError(f"expected a factoring of {shape}, got {view}")
    if factors:
        factors[-1].extend(range(at, len(view)))  # trailing ones belong to the last dim
    return factors
