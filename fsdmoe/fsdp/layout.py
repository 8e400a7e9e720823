"""Where each parameter lies in a flat buffer that is cut into one equal slice per rank. Pure arithmetic.

::

    rank 0 |  q_proj [0, a)                                |    a parameter is contiguous, so it can be viewed
    rank 1 |  q_proj [a, end) | k_proj | v_proj [0, b)     |    in the gathered buffer; it may land unevenly
    rank 2 |  v_proj [b, end) | o_proj | norm | gate | pad |    on the ranks, or not at all on some; no
                                                                granule is ever cut

A *granule* is a run of elements, counted from the parameter's own start, that must stay on one rank. With
small granules (64 elements by default) any slice length that is a multiple of 64 will do, and padding is
next to nothing at any number of ranks. Rows, blocks of rows or whole tensors take a search over slice
lengths and orders."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

ALIGN_BYTES = 128
DEFAULT_GRANULE = 64

_MAX_TRIES = 64  # slice lengths tried per step size
_MAX_GRANULES = 8  # distinct large granules whose common multiples are tried


@dataclass(frozen=True)
class Item:
    """A parameter to be placed."""

    name: str
    numel: int
    granule: int = DEFAULT_GRANULE


@dataclass(frozen=True)
class ParamSegment:
    """Where a whole parameter lies in the flat buffer."""

    name: str
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class OwnedRange:
    """What one rank's slice holds of a parameter: elements ``[start, end)`` of it, at ``offset`` in the
    slice."""

    name: str
    start: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a flat tensor that is laid out as the slice."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class FlatLayout:
    """A flat buffer of ``num_ranks`` equal slices and the parameters in it, by position."""

    segments: tuple[ParamSegment, ...]
    slice_numel: int
    num_ranks: int

    @property
    def numel(self) -> int:
        return self.slice_numel * self.num_ranks

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(segment.numel for segment in self.segments)

    def padding_ranges(self) -> Iterator[tuple[int, int]]:
        """The gaps between parameters and the tail, as ranges of the flat buffer."""
        at = 0
        for segment in self.segments:
            if segment.start > at:
                yield at, segment.start
            at = segment.end
        if self.numel > at:
            yield at, self.numel

    def owned(self, rank: int) -> list[OwnedRange]:
        """For every parameter, in order, what ``rank`` holds of it; empty ranges included."""
        low, high = rank * self.slice_numel, (rank + 1) * self.slice_numel
        found = []
        for segment in self.segments:
            start = min(max(low, segment.start), segment.end) - segment.start
            end = min(max(high, segment.start), segment.end) - segment.start
            offset = segment.start + start - low if start < end else 0
            found.append(OwnedRange(segment.name, start, max(start, end), offset))
        return found


def align_elements(itemsize: int) -> int:
    """Parameters start at multiples of this many elements: 128 bytes, and never inside a default granule."""
    return max(DEFAULT_GRANULE, ALIGN_BYTES // itemsize)


def plan_layout(items: Sequence[Item], num_ranks: int, align: int = DEFAULT_GRANULE) -> FlatLayout:
    """Place ``items`` over ``num_ranks`` slices with as little padding as is found, in their order if that
    is free."""
    shapes = tuple((item.numel, max(1, min(item.granule, item.numel))) for item in items)
    slice_numel, starts = _plan(shapes, num_ranks, align)
    segments = (ParamSegment(item.name, start, item.numel) for item, start in zip(items, starts, strict=True))
    return FlatLayout(tuple(sorted(segments, key=lambda s: (s.start, s.end))), slice_numel, num_ranks)


Shapes = tuple[tuple[int, int], ...]  # (numel, granule) of each item


@functools.lru_cache(maxsize=4096)
def _plan(shapes: Shapes, num_ranks: int, align: int) -> tuple[int, tuple[int, ...]]:
    """Slice length and the start of each item. Cached: the layers of a model are mostly alike."""
    total = sum(_up(numel, align) for numel, _ in shapes)
    lowest = max(align, _up(-(-total // num_ranks), align))
    if num_ranks == 1 or all(align % granule == 0 for _, granule in shapes):
        starts = itertools.accumulate((_up(numel, align) for numel, _ in shapes), initial=0)
        return lowest, tuple(starts)[: len(shapes)]
    lowest = max([lowest, *(_up(numel, align) for numel, granule in shapes if granule == numel > align)])
    best: tuple[int, tuple[int, ...]] | None = None
    for order in _orders(shapes):
        for step in _steps(shapes, align):
            start = _up(lowest, step)
            for slice_numel in range(start, start + step * _MAX_TRIES, step):
                if best is not None and slice_numel >= best[0]:
                    break
                placed = _place(shapes, order, slice_numel, num_ranks, align)
                if placed is not None:
                    best = slice_numel, placed
                    break
    return best or _plan_loosely(shapes, num_ranks, align, lowest)


def _plan_loosely(shapes: Shapes, num_ranks: int, align: int, lowest: int) -> tuple[int, tuple[int, ...]]:
    """Slices that are a multiple of every granule fit whatever the order, once they are long enough."""
    step = math.lcm(align, *(granule for numel, granule in shapes if granule < numel))
    order = _orders(shapes)[-1]
    slice_numel = _up(lowest, step)
    while (placed := _place(shapes, order, slice_numel, num_ranks, align)) is None:
        slice_numel += max(step, _up(slice_numel // 8, step))
    return slice_numel, placed


def _orders(shapes: Shapes) -> list[tuple[int, ...]]:
    """Orders worth trying: as given, equal granules side by side, large parameters first."""
    given = range(len(shapes))
    return [
        tuple(given),
        tuple(sorted(given, key=lambda i: (-shapes[i][1], -shapes[i][0]))),
        tuple(sorted(given, key=lambda i: -shapes[i][0])),
    ]


def _steps(shapes: Shapes, align: int) -> list[int]:
    """Slice lengths are multiples of one of these: the alignment, joined with up to three of the granules."""
    granules = sorted({granule for numel, granule in shapes if granule < numel and align % granule})
    granules = granules[:_MAX_GRANULES]
    chosen = itertools.chain.from_iterable(itertools.combinations(granules, n) for n in range(4))
    return sorted({math.lcm(align, *some) for some in chosen})


def _place(
    shapes: Shapes, order: Sequence[int], slice_numel: int, num_ranks: int, align: int
) -> tuple[int, ...] | None:
    """Starts of all items when they are laid one after the other in ``order``; None when they do not fit."""
    starts, position = [0] * len(shapes), 0
    for index in order:
        numel, granule = shapes[index]
        start = _fit(_up(position, align), numel, granule, slice_numel, align)
        if start is None or start + numel > slice_numel * num_ranks:
            return None
        starts[index], position = start, start + numel
    return tuple(starts)


def _fit(start: int, numel: int, granule: int, slice_numel: int, align: int) -> int | None:
    """The first aligned position from ``start`` on at which no slice boundary cuts a granule."""
    boundary = (start // slice_numel + 1) * slice_numel
    if start + numel <= boundary:
        return start
    if granule < numel:
        # A start this far before the boundary is aligned, and the boundary cuts between granules.
        step = math.lcm(granule, align)
        shifted = boundary - (boundary - start) // step * step
        crosses_once = shifted + numel <= boundary + slice_numel
        if shifted < boundary and (crosses_once or slice_numel % granule == 0):
            return shifted
    if numel <= slice_numel or (granule < numel and slice_numel % granule == 0):
        return boundary
    return None


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
