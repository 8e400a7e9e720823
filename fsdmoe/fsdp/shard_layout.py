"""Where the pieces of one sharded tensor lie, and the collectives that put them together again.

The shard axis gives each rank any flat range of the local tensor, so pieces are ragged and may be empty;
the axes of the placement cut the global tensor into equal local ones. Gathering undoes the first, then the
second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.boxes import Box
from fsdmoe.core.placement import Placement
from fsdmoe.mesh import DENSE_AXES, EXPERT_AXES, Axis, Meshes

# Broadcasting from each owner moves no padding but costs a launch each; past this many, gather equal chunks.
MAX_BROADCASTS = 8
GATHER_BYTES = 64 << 20


@dataclass(frozen=True)
class RaggedShard(TorchPlacement):
    """The placement that stock DTensor has no word for: the ranks of a mesh axis share the flattened local
    tensor in ranges of any length; some hold nothing.

    It says what *this* rank holds, so it differs from rank to rank. torch's own operations do not know it:
    ``to_dtensor()`` gives the same tensor in placements that they do.
    """

    start: int
    """First element of the flattened local tensor that this rank holds."""
    end: int

    def __post_init__(self) -> None:
        super().__init__()  # torch 2.11's base is not Python's, and refuses an object it has not made

    def __repr__(self) -> str:
        return f"RaggedShard([{self.start}, {self.end}))"

    __str__ = __repr__


class ShardLayout:
    """What two sharded tensors must agree on to be computed with element by element; shared by all clones."""

    def __init__(self, placement: Placement, start: int, end: int, meshes: Meshes, shard_axis: Axis) -> None:
        self.placement, self.start, self.end = placement, start, end
        self.meshes, self.shard_axis = meshes, shard_axis
        self.local_shape = placement.local_shape(meshes)
        self.draws: torch.Generator | None = None
        """Random values for such tensors come from here, alike on all ranks; None: they are refused."""
        numel = math.prod(self.local_shape)
        if not 0 <= start <= end <= numel:
            raise AssertionError(f"expected a range inside [0, {numel}), got [{start}, {end})")

    @functools.cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Of the global tensor; for checkpoints and copies."""
        return tuple(self.placement.boxes(self.meshes, self.start, self.end))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ShardLayout) and (
            (self.placement, self.start, self.end, self.shard_axis)
            == (other.placement, other.start, other.end, other.shard_axis)
            and self.meshes.degrees == other.meshes.degrees
        )

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardLayout:
        return self  # immutable, and process groups cannot be copied

    def reduction_axes(self) -> list[Axis]:
        """The axes over which the tensor's elements are spread; replicas are not among them."""
        axes = [self.shard_axis, *(axis for axis, _ in self.placement.cuts)]
        return [axis for axis in axes if self.meshes.size(axis) > 1]

    # In DTensor's words: a mesh whose dims are, from left to right, the axis that replicates the tensor,
    # those that split it, and the one that shards what they leave. Axes of one rank are left out, the shard
    # axis aside.

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        axes, plain = [*self._outer_axes, self.shard_axis], self._plain_axes
        if len(axes) == 1:
            return self.meshes[self.shard_axis]
        ranks = (self.meshes.expert if self.placement.mesh == "expert" else self.meshes.dense).mesh
        outer = [plain.index(axis) for axis in self._outer_axes]
        sharding = [dim for dim in range(len(plain)) if dim not in outer]
        return DeviceMesh.from_group(
            [self.meshes.group(axis) for axis in axes],
            self.meshes.device_type,
            ranks.permute(*outer, *sharding).reshape([self.meshes.size(axis) for axis in axes]),
            mesh_dim_names=tuple(axis.value for axis in axes),
        )

    @functools.cached_property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """One for each dim of ``device_mesh``, applied from left to right."""
        cuts = dict(self.placement.cuts)
        outer = (cuts.get(axis, Replicate()) for axis in self._outer_axes)
        return (*outer, RaggedShard(self.start, self.end))

    @functools.cached_property
    def even_placements(self) -> tuple[TorchPlacement, ...]:
        """The nearest that stock DTensor has. Not ``_StridedShard``: torch's checkpoints store one box a
        rank, and gate and up are two."""
        outer = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in self.placements[:-1]]
        return (*outer, Shard(0) if self.placement.global_shape else Replicate())

    @property
    def _plain_axes(self) -> tuple[Axis, ...]:
        return EXPERT_AXES if self.placement.mesh == "expert" else DENSE_AXES

    @property
    def _outer_axes(self) -> list[Axis]:
        axes = [self._plain_axes[0], *(axis for axis, _ in self.placement.cuts)]
        return [axis for axis in axes if self.meshes.size(axis) > 1]


def gather_whole(piece: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """The global tensor on every rank. Collective over the shard axis and the splitting axes.

    Holds the result, one gathered part of it and a bounded buffer at a time; replicas are not involved.
    """
    whole = _gather_ranges(piece, layout).view(layout.placement.local_view_shape(layout.meshes))
    for axis, dim in reversed(layout.placement.splits):
        whole = _gather_dim(whole, dim, layout.meshes, axis)
    return whole.reshape(layout.placement.global_shape)


def _gather_ranges(piece: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """The flat local tensor from the pieces along the shard axis, however they are distributed."""
    meshes, axis = layout.meshes, layout.shard_axis
    numel = math.prod(layout.local_shape)
    if meshes.size(axis) == 1:
        ranges = [(layout.start, layout.end)]
    else:
        is_here = piece.device.type == meshes.device.type
        mine = torch.tensor([layout.start, layout.end, is_here], device=meshes.device)
        found = [torch.empty_like(mine) for _ in range(meshes.size(axis))]
        dist.all_gather(found, mine, group=meshes.group(axis))
        table = torch.stack(found).tolist()
        ranges = [(start, end) for start, end, _ in table]
        # An optimizer keeps a moment in host memory on some ranks only: one device for all.
        if any(here for *_, here in table):
            piece = piece.to(meshes.device)
    owned = sorted(r for r in ranges if r[0] < r[1])
    if [0, *(end for _, end in owned)] != [*(start for start, _ in owned), numel]:
        raise AssertionError(f"expected the pieces along {axis} to make up [0, {numel}) once, got {ranges}")
    out = torch.empty(numel, dtype=piece.dtype, device=piece.device)
    out[layout.start : layout.end].copy_(piece)
    if len(owned) <= MAX_BROADCASTS:
        for rank, (start, end) in enumerate(ranges):
            if start < end and meshes.size(axis) > 1:
                _broadcast(out[start:end], rank, meshes, axis)
        return out
    for rank, low, values in _gathered_chunks(piece, ranges, meshes, axis):
        start, end = ranges[rank][0] + low, min(ranges[rank][0] + low + values.numel(), ranges[rank][1])
        if start < end:
            out[start:end].copy_(values[: end - start])
    return out


def _gathered_chunks(
    piece: torch.Tensor, ranges: list[tuple[int, int]], meshes: Meshes, axis: Axis
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Every rank's piece in equal chunks, a bounded buffer at a time: (rank, offset in its piece, values)."""
    num_ranks, longest = len(ranges), max(end - start for start, end in ranges)
    chunk = min(longest, max(1, GATHER_BYTES // (num_ranks * piece.element_size())))
    send = torch.zeros(chunk, dtype=piece.dtype, device=piece.device)
    received = [torch.empty_like(send) for _ in range(num_ranks)]
    for low in range(0, longest, chunk):
        mine = piece[low : low + chunk]
        send[: mine.numel()].copy_(mine)
        dist.all_gather([_bytes(r) for r in received], _bytes(send), group=meshes.group(axis))
        for rank, values in enumerate(received):
            yield rank, low, values


def _gather_dim(local: torch.Tensor, dim: int, meshes: Meshes, axis: Axis) -> torch.Tensor:
    """Join the equal parts that the ranks of ``axis`` hold of ``dim``."""
    if meshes.size(axis) == 1:
        return local
    local, size = local.contiguous(), local.shape[dim]
    joined = local.new_empty([n * meshes.size(axis) if d == dim else n for d, n in enumerate(local.shape)])
    buffer = torch.empty_like(local)
    for rank in range(meshes.size(axis)):
        part = local if rank == meshes.rank(axis) else buffer
        _broadcast(part, rank, meshes, axis)
        joined.narrow(dim, rank * size, size).copy_(part)
    return joined


def _broadcast(tensor: torch.Tensor, rank: int, meshes: Meshes, axis: Axis) -> None:
    if tensor.numel():
        dist.broadcast(_bytes(tensor), group_src=rank, group=meshes.group(axis))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: these collectives move any dtype, float8 too, whatever the backend knows."""
    return tensor.view(-1).view(torch.uint8)
