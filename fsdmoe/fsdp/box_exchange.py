"""From any division of a tensor into boxes to any other: one exchange, and no rank holds the whole.

Every rank says which boxes it holds and which it wants; each then sends the intersections::

    held by 0  |####|####|    |      wanted by 0  |####|    |
    held by 1  |    |    |####|      wanted by 1  |    |####|####|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdmoe.core.boxes import Shape, overlap


class Extent(NamedTuple):
    """Where a box lies in the global tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()

    def intersection(self, other: Extent) -> Extent | None:
        common = overlap(*self, *other)
        return None if common is None else Extent(*common)

    def part_of(self, box: torch.Tensor, whole: Extent) -> torch.Tensor:
        """This extent as a view of ``box``, which holds the extent ``whole``."""
        starts = (o - base for o, base in zip(self.offsets, whole.offsets, strict=True))
        return box[tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))]


def exchange_boxes(
    held: Sequence[tuple[Extent, torch.Tensor]],
    wanted: Sequence[tuple[Extent, torch.Tensor]],
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    """Fill the tensors of ``wanted`` from what the ranks of ``group`` hold. Collective.

    Args:
        held: This rank's boxes; several ranks may hold the same one.
        wanted: Boxes to fill, with tensors (views, strided if need be) of their sizes.
        like: Any tensor with the dtype and device of all of them.
        group: Ranks that together hold everything that one of them wants.
    """
    mine = [extent for extent, _ in held], [extent for extent, _ in wanted]
    said: list[tuple[list[Extent], list[Extent]]] = [([], [])] * group.size()
    dist.all_gather_object(said, mine, group=group)
    me = group.rank()
    holders: dict[Extent, list[int]] = {}
    for rank, (extents, _) in enumerate(said):
        for extent in extents:
            holders.setdefault(extent, []).append(rank)
    sent = [_overlaps(holders, me, rank, mine[0], said[rank][1]) for rank in range(group.size())]
    received = [_overlaps(holders, rank, me, said[rank][0], mine[1]) for rank in range(group.size())]
    parts = [[part.part_of(held[i][1], mine[0][i]).reshape(-1) for i, _, part in to] for to in sent]
    nothing = like.new_empty(0)
    outgoing = torch.cat([nothing, *(part for to in parts for part in to)])
    counts = [sum(part.numel for _, _, part in source) for source in received]
    incoming = like.new_empty(sum(counts))
    size = like.element_size()
    dist.all_to_all_single(
        incoming.view(torch.uint8),  # bytes: any dtype can be sent, even one the backend cannot add
        outgoing.view(torch.uint8),
        [count * size for count in counts],
        [sum(part.numel() for part in to) * size for to in parts],
        group=group,
    )
    at = 0
    for _, index, part in (each for source in received for each in source):
        target = part.part_of(wanted[index][1], mine[1][index])
        target.copy_(incoming[at : at + part.numel].view(part.sizes))
        at += part.numel


def _overlaps(
    holders: dict[Extent, list[int]], sender: int, receiver: int, held: list[Extent], wanted: list[Extent]
) -> list[tuple[int, int, Extent]]:
    """What ``sender`` sends to ``receiver``, in an order that both can compute: indices of the two boxes,
    and what they have in common. Of several ranks that hold a box, the receiver itself or the first sends."""

    def found() -> Iterator[tuple[int, int, Extent]]:
        for i, box in enumerate(held):
            ranks = holders[box]
            if sender == (receiver if receiver in ranks else ranks[0]):
                for j, want in enumerate(wanted):
                    part = box.intersection(want)
                    if part is not None:
                        yield i, j, part

    return list(found())
