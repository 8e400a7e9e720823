"""Boxes: which hyper-rectangles of a global tensor a flat range of one rank's part of it holds.

A *box* comes with the strides at which its elements lie in such a flat range. Boxes are what checkpoints
store, what ``full_tensor`` assembles, and the only description that survives a change of layout; torch's
placements cannot say them, for a flat range begins and ends anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


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


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other: Sequence[int], other_sizes: Sequence[int]
) -> tuple[Shape, Shape] | None:
    """The common box of two boxes, as its offsets and its sizes; None when they are apart."""
    low = tuple(map(max, offsets, other))
    high = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other, other_sizes, strict=True))
    common = tuple(end - start for start, end in zip(low, high, strict=True))
    return (low, common) if all(size > 0 for size in common) else None


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
class BoxRun:
    """A contiguous range of one global dim: where it starts, and where its first element lies locally."""

    offset: int
    size: int
    skip: int
    stride: int


def contiguous_runs(
    view: Shape, dims: Sequence[int], low: Sequence[int], sizes: Shape, strides: Shape
) -> list[BoxRun]:
    """The view-box's extent over the view dims ``dims`` of one global dim, as contiguous ranges of that
    dim."""
    inner = len(dims) - 1  # dims after `inner` are whole, so ranges along dims[inner] are contiguous
    while inner > 0 and sizes[dims[inner]] == view[dims[inner]]:
        inner -= 1
    unit = math.prod(view[d] for d in dims[inner + 1 :])
    found = []
    for index in itertools.product(*(range(sizes[d]) for d in dims[:inner])):
        outer = 0
        for d, i in zip(dims[:inner], index, strict=True):
            outer = outer * view[d] + low[d] + i
        found.append(
            BoxRun(
                offset=(outer * view[dims[inner]] + low[dims[inner]]) * unit,
                size=sizes[dims[inner]] * unit,
                skip=sum(i * strides[d] for d, i in zip(dims[:inner], index, strict=True)),
                stride=strides[dims[-1]],
            )
        )
    return found
