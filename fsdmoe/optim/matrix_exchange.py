"""Who computes which matrix, and what is sent for it: decided alike on all ranks, from plans alone.

A block (:mod:`fsdmoe.optim.matrices`) that one rank holds whole is computed there. One that a boundary of
slices, ``tp`` or ``etp`` cuts is computed by one of the ranks that hold a part, whoever has the least work so
far; the others send it their parts and get back the result of these. Replicas (``dp_outer``) hold the same
values: each block is computed in one of them, and the result sent to all::

    rank 0 | A A A A A B B |      A and C where they lie, B at rank 0 or 1:
    rank 1 | B B B C C C C |      one packed exchange of parts, one of results
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdmoe.core.placement import Coordinates
from fsdmoe.mesh import Axis
from fsdmoe.optim.matrices import BlockPiece, FlatMatrices

MAX_BATCH = 1 << 27
"""Elements of matrices of one shape that are computed together: 85 of 768 x 2048, whose tiles fill an H200
seven times with little left over."""


class MatrixBlock(NamedTuple):
    """A block, and the rank of the world that computes it."""

    param: int
    pieces: tuple[BlockPiece, ...]
    owner: int

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1


class RangeCopy(NamedTuple):
    """A range of what a rank holds of a parameter, and its place in a flat buffer."""

    param: int
    offset: int
    place: int
    numel: int


@dataclass
class MatrixBatch:
    """Blocks of one form that a rank computes together, one after another in a flat buffer."""

    form: tuple[int, int]
    """A parameter of this form, and into how many parts its blocks are cut."""
    count: int = 0
    own: list[RangeCopy] = field(default_factory=list)
    """What the rank holds itself."""
    received: list[tuple[int, int, int]] = field(default_factory=list)
    """From the packed buffer of the first exchange: place there, place here, elements."""
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    """To the packed buffer of the second: place here, place there, elements."""


@dataclass
class RankExchange:
    """What one rank computes, sends and receives in a step. Sizes are elements, by rank of the world."""

    here: list[MatrixBatch]
    """Of blocks that it holds whole: computed while others are on their way."""
    gathered: list[MatrixBatch]
    parts: list[RangeCopy]
    """What it sends of blocks that others compute, in the order of the packed buffer."""
    results: list[RangeCopy]
    """Where results of these belong, in the order of the packed buffer that comes back."""
    elsewhere: list[RangeCopy]
    """What it holds of blocks that another replica computes from its own copy; nothing is put in a buffer."""
    parts_to: list[int]
    parts_from: list[int]
    results_to: list[int]
    results_from: list[int]


def world_size(at: Coordinates) -> int:
    return at.size(Axis.DP_OUTER) * at.size(Axis.FSDP_TP)


def assign_blocks(params: Sequence[FlatMatrices], at: Coordinates) -> list[MatrixBlock]:
    """All blocks of all parameters, with their owners."""
    replica, replicas = at.size(Axis.FSDP_TP), at.size(Axis.DP_OUTER)
    blocks = [
        (number, tuple(param.pieces(cell, block, at)))
        for number, param in enumerate(params)
        for cell in param.cells(at)
        for block in param.blocks(at)
    ]
    loads = [0.0] * (replica * replicas)
    owners = [0] * len(blocks)
    work = [_work(param) for param in params]
    # Those without a choice first, then the largest: the small ones fill what is left.
    free = [index for index, (_, pieces) in enumerate(blocks) if len(pieces) > 1 or replicas > 1]
    for index, (number, pieces) in enumerate(blocks):
        if len(pieces) == 1 and replicas == 1:
            owners[index] = pieces[0].rank
            loads[owners[index]] += work[number]
    for index in sorted(free, key=lambda i: -work[blocks[i][0]]):
        number, pieces = blocks[index]
        held: dict[int, int] = {}
        for piece in pieces:
            held[piece.rank] = held.get(piece.rank, 0) + piece.numel
        ranks = [outer * replica + rank for outer in range(replicas) for rank in held]
        owner = min(ranks, key=lambda rank: (loads[rank], -held[rank % replica], rank))
        owners[index] = owner
        loads[owner] += work[number]
    return [MatrixBlock(*block, owner) for block, owner in zip(blocks, owners, strict=True)]


def _work(param: FlatMatrices) -> float:
    """Products of one iteration over a block."""
    short, long = sorted(param.form.shape)
    return param.form.numel / (short * long) * (4 * short * short * long + 2 * short**3)


def plan_exchange(
    params: Sequence[FlatMatrices], blocks: Sequence[MatrixBlock], me: int, at: Coordinates
) -> RankExchange:
    """What rank ``me`` of the world does."""
    replica, replicas, world = at.size(Axis.FSDP_TP), at.size(Axis.DP_OUTER), world_size(at)
    plan = RankExchange([], [], [], [], [], *([0] * world for _ in range(4)))
    batches = _Batches(params, plan, at)
    parts: dict[int, list[tuple[int, int, int]]] = {}
    results: dict[int, list[tuple[int, int, int]]] = {}
    wanted: dict[int, list[tuple[MatrixBatch, int, int]]] = {}
    returned: dict[int, list[tuple[MatrixBatch, int, int]]] = {}
    for block in blocks:
        if block.owner != me and all(piece.rank != me % replica for piece in block.pieces):
            continue
        outer = block.owner // replica
        mine = batches.add(block) if block.owner == me else None
        for piece in block.pieces:
            source, held = outer * replica + piece.rank, (block.param, piece.offset, piece.numel)
            if source != block.owner and source == me:
                parts.setdefault(block.owner, []).append(held)
            if mine is not None:
                batch, start = mine
                if source == me:
                    _append(batch.own, RangeCopy(block.param, piece.offset, start + piece.place, piece.numel))
                else:
                    wanted.setdefault(source, []).append((batch, start + piece.place, piece.numel))
                for other in range(replicas):
                    target = other * replica + piece.rank
                    if target != me:
                        returned.setdefault(target, []).append((batch, start + piece.place, piece.numel))
            elif me % replica == piece.rank:
                results.setdefault(block.owner, []).append(held)
                if source != me:
                    plan.elsewhere.append(RangeCopy(block.param, piece.offset, 0, piece.numel))
    plan.parts = _packed(parts, plan.parts_to)
    plan.results = _packed(results, plan.results_from)
    for batch, place, numel, packed in _places(wanted, plan.parts_from):
        batch.received.append((packed, place, numel))
    for batch, place, numel, packed in _places(returned, plan.results_to):
        batch.sent.append((place, packed, numel))
    return plan


class _Batches:
    """The batches of a rank, by form; a new one where the last is full."""

    def __init__(self, params: Sequence[FlatMatrices], plan: RankExchange, at: Coordinates) -> None:
        self._params, self._plan, self._at = params, plan, at
        self._open: dict[tuple[object, ...], MatrixBatch] = {}

    def add(self, block: MatrixBlock) -> tuple[MatrixBatch, int]:
        """The batch of a block, and where the block begins in it."""
        form = self._params[block.param].form
        num_parts = form.num_parts(self._at)
        cut = form.block_cut[1] if form.block_cut is not None and num_parts > 1 else None
        key = (form.block, form.order, cut, block.is_whole)
        batch = self._open.get(key)
        if batch is None or (batch.count + 1) * form.numel > MAX_BATCH:
            batch = self._open[key] = MatrixBatch((block.param, num_parts))
            (self._plan.here if block.is_whole else self._plan.gathered).append(batch)
        batch.count += 1
        return batch, (batch.count - 1) * form.numel


def _append(copies: list[RangeCopy], new: RangeCopy) -> None:
    """Joined with the last one where it goes on from there: experts side by side are one copy."""
    if copies and new.param == copies[-1].param:
        last = copies[-1]
        if (last.offset + last.numel, last.place + last.numel) == (new.offset, new.place):
            copies[-1] = last._replace(numel=last.numel + new.numel)
            return
    copies.append(new)


def _packed(by_rank: dict[int, list[tuple[int, int, int]]], counts: list[int]) -> list[RangeCopy]:
    """Ranges of parameters, rank by rank; ``counts`` is told how much goes to each."""
    copies: list[RangeCopy] = []
    place = 0
    for rank in sorted(by_rank):
        for param, offset, numel in by_rank[rank]:
            _append(copies, RangeCopy(param, offset, place, numel))
            counts[rank] += numel
            place += numel
    return copies


def _places(
    by_rank: dict[int, list[tuple[MatrixBatch, int, int]]], counts: list[int]
) -> list[tuple[MatrixBatch, int, int, int]]:
    """Ranges of batches, rank by rank, each with its place in the packed buffer."""
    found = []
    packed = 0
    for rank in sorted(by_rank):
        for batch, place, numel in by_rank[rank]:
            found.append((batch, place, numel, packed))
            counts[rank] += numel
            packed += numel
    return found
