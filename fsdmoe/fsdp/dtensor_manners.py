"""DTensor's interface over a ragged layout: what torch's tools ask a sharded parameter for.

``device_mesh`` and ``placements`` describe the layout in DTensor's words, with :class:`RaggedShard` last;
``redistribute`` and ``to_dtensor`` give a stock ``DTensor``, ``from_dtensor`` takes one. They are copies:
values move between ranks. All of it is for tools and checkpoints; nothing of it runs in a training step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from fsdmoe.core.placement import contiguous_strides
from fsdmoe.fsdp.box_exchange import Extent, exchange_boxes
from fsdmoe.fsdp.shard_layout import RaggedShard, ShardLayout
from fsdmoe.fsdp.strided import without_strides
from fsdmoe.mesh import Axis


class DTensorManners:
    """The mixin; :class:`fsdmoe.fsdp.ShardedTensor` has the piece and the layout."""

    _layout: ShardLayout
    shape: torch.Size

    @property
    def piece(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of ``placements``: what replicates the tensor, what splits it, what shards it."""
        return self._layout.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How each dim of ``device_mesh`` cuts the tensor, left to right; the last is ragged."""
        return self._layout.placements

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's elements: a 1-D view, since a ragged piece is no box.

        Writing it writes the tensor past all counters: of a model's parameter, the engine must be told
        (``mark_changed()``, on every rank)."""
        if grad_placements is not None:
            raise NotImplementedError("grad_placements: gradients of a sharded tensor have its own layout")
        return self.piece

    def to_dtensor(self) -> DTensor:
        """A copy as a stock ``DTensor`` in even placements, on the same mesh. Collective.

        What TP or EP split stays split, in contiguous parts; what the shard axis holds becomes chunks of the
        first dim."""
        return self.redistribute(placements=self._layout.even_placements)

    @torch.no_grad()
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor:
        """A copy as a stock ``DTensor``. Collective over all ranks of a replica.

        Args:
            device_mesh: Any mesh that this rank is in; None keeps the tensor's.
            placements: ``Replicate()`` and ``Shard(dim)``, one a mesh dim.
            async_op: Accepted for DTensor's signature; the result is always there on return.
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        placements = _plain_placements(self, mesh, placements)
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, mesh, placements)
        local = self.piece.new_empty(sizes)
        wanted = [(Extent(tuple(offsets), tuple(sizes)), local)] if local.numel() else []
        # Each replica holds everything, so values are sent only inside of one.
        group = self._layout.meshes.group(Axis.FSDP_TP)
        exchange_boxes(_held(self.piece, self._layout), wanted, self.piece, group)
        return DTensor.from_local(
            local, mesh, placements, run_check=False,
            shape=self.shape, stride=contiguous_strides(self.shape),
        )  # fmt: skip


@torch.no_grad()
def piece_of_dtensor(source: DTensor, layout: ShardLayout) -> torch.Tensor:
    """The elements of ``source`` that ``layout`` gives this rank, as a flat tensor. Collective, all ranks."""
    if source.shape != layout.placement.global_shape:
        raise ValueError(
            f"expected a DTensor of shape {layout.placement.global_shape}, got {tuple(source.shape)}"
        )
    if any(placement.is_partial() for placement in source.placements):
        raise NotImplementedError(
            f"a DTensor with placements {source.placements} is not summed up yet; redistribute() its partial "
            "placements first"
        )
    source = without_strides(source)  # one box tells what a rank holds of it
    sizes, offsets = compute_local_shape_and_global_offset(
        source.shape, source.device_mesh, source.placements
    )
    local = source.to_local()
    piece = local.new_empty(layout.end - layout.start)
    held = [(Extent(tuple(offsets), tuple(sizes)), local)] if local.numel() else []
    exchange_boxes(held, _held(piece, layout), piece, layout.meshes.group(Axis.WORLD))
    return piece


def _held(piece: torch.Tensor, layout: ShardLayout) -> list[tuple[Extent, torch.Tensor]]:
    return [(Extent(box.offsets, box.sizes), box.view_of(piece)) for box in layout.boxes]


def _plain_placements(
    tensor: DTensorManners, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> tuple[Placement, ...]:
    if placements is None:
        raise ValueError("redistribute: expected placements, one for each dim of the mesh, got none")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"redistribute: expected {mesh.ndim} placements for {mesh}, got {len(placements)}: {placements}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"redistribute: this rank is not in {mesh}; every rank of the tensor must be")
    made = []
    for placement in placements:
        if isinstance(placement, RaggedShard):
            raise NotImplementedError(
                "redistribute: to another ragged layout; make a tensor of that layout and copy_() this one's "
                "to_dtensor() into it"
            )
        if type(placement) is Shard:
            dim = placement.dim + len(tensor.shape) if placement.dim < 0 else placement.dim
            if not 0 <= dim < len(tensor.shape):
                raise ValueError(
                    f"redistribute: {placement!r} of a tensor with {len(tensor.shape)} dims; choose one of "
                    "them"
                )
            placement = Shard(dim)
        elif type(placement) is not Replicate:
            raise NotImplementedError(
                f"redistribute: {placement!r} is no way to hold values; choose Replicate() or Shard(dim)"
            )
        made.append(placement)
    return tuple(made)
