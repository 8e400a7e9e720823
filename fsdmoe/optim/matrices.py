"""Which matrices a parameter is made of, and where they lie on flat shards. Pure arithmetic.

A parameter is ``count`` *blocks* in a row; a block is one matrix, or the two of a fused gate and up whose
elements alternate. Axes cut the count of blocks (``ep`` the experts, ``tp`` the heads) or each block (``tp``,
``etp``); the shard axis then gives each rank a flat range of what these leave::

    gate_up [E, 2I, H]    count 2E (gate and up apart), block [I, H]      ep cuts the count, etp cuts I
    down [E, H, I]        count E,                      block [H, I]      etp cuts I
    q_proj [N*D, H]       count 1 or, by head, N,       block [N*D, H] or [D, H]

A block that is cut is sent part by part, and lies in the buffer of whoever computes it part after part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdmoe.core.boxes import Shape
from fsdmoe.core.placement import Coordinates, Placement, split_factor
from fsdmoe.fsdp.plan import GroupPlan, ParamPlan
from fsdmoe.mesh import Axis


@dataclass(frozen=True)
class MatrixForm:
    """How a parameter is made of matrices."""

    count: int
    block: Shape
    order: tuple[int, ...] = (0, 1)
    """The dims of a block as matrices: the last two are rows and columns."""
    count_axis: Axis | None = None
    """Which axis cuts the count."""
    block_cut: tuple[Axis, int] | None = None
    """Which axis cuts which dim of every block."""
    is_transposed: bool = False
    """Rows are inputs and columns outputs, as some models store their experts."""

    @property
    def numel(self) -> int:
        """Of a block."""
        return math.prod(self.block)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        return self.block[self.order[-2]], self.block[self.order[-1]]

    @property
    def outputs_and_inputs(self) -> tuple[int, int]:
        """Of the product with a matrix: what the size of an update follows."""
        rows, columns = self.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    def num_parts(self, at: Coordinates) -> int:
        """Into how many parts each block is cut."""
        return 1 if self.block_cut is None else at.size(self.block_cut[0])

    def join(self, parts_NB: torch.Tensor, num_parts: int) -> torch.Tensor:
        """Matrices from flat blocks, each part after part."""
        blocks = parts_NB.view(-1, *self.block)
        if num_parts > 1 and self.block_cut is not None:
            dim = self.block_cut[1]
            local = [size // num_parts if d == dim else size for d, size in enumerate(self.block)]
            blocks = parts_NB.view(-1, num_parts, *local).movedim(1, 1 + dim).reshape(-1, *self.block)
        return blocks.permute(0, *(1 + dim for dim in self.order)).reshape(-1, *self.shape)

    def part(self, matrices_MRC: torch.Tensor, num_parts: int) -> torch.Tensor:
        """Flat blocks, each part after part, from matrices."""
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        ordered = matrices_MRC.reshape(-1, *(self.block[dim] for dim in self.order))
        blocks = ordered.permute(0, *(1 + dim for dim in inverse))
        if num_parts > 1 and self.block_cut is not None:
            dim = self.block_cut[1]
            cut = (*self.block[:dim], num_parts, self.block[dim] // num_parts, *self.block[dim + 1 :])
            blocks = blocks.reshape(-1, *cut).movedim(1 + dim, 1)
        return blocks.reshape(-1, self.numel)


def has_matrices(name: str, placement: Placement) -> bool:
    """Whether a parameter is a matrix, or a matrix for each expert; biases are not. Nor are the factors of
    adapters on experts, which stand next to each other in two dims: as one matrix, experts would mix."""
    dims = len(placement.global_shape)
    is_of_experts = any(axis == Axis.EP for axis, _ in placement.cuts)
    return dims in ((3,) if is_of_experts else (2, 3)) and not name.endswith("bias")


def form_of(name: str, placement: Placement, head_rows: int = 0) -> MatrixForm:
    """The matrices of a parameter; ``head_rows``: rows of each head where heads are matrices of their own."""
    shape = placement.global_shape
    cuts = {cut.dim: (axis, split_factor(cut)) for axis, cut in placement.cuts}
    count_axis = cuts[0][0] if 0 in cuts and (len(shape) == 3 or head_rows) else None
    if len(shape) == 2 and head_rows:
        of_columns = (cuts[1][0], 1) if 1 in cuts else None
        return MatrixForm(shape[0] // head_rows, (head_rows, shape[1]), (0, 1), count_axis, of_columns)
    first = len(shape) - 2
    count = shape[0] if first else 1
    rows, columns = shape[first:]
    inner = [(dim - first, *cuts[dim]) for dim in cuts if dim >= first]
    if not inner:
        return MatrixForm(count, (rows, columns), (0, 1), count_axis)
    dim, axis, factor = inner[0]
    is_interleaved = first == 1 and factor == 1 and name.endswith("gate_up_proj")
    block: Shape = (rows, columns)
    order: Shape = (0, 1)
    cut = dim
    if is_interleaved and dim == 0:
        block, order = (rows // 2, 2, columns), (1, 0, 2)
    elif is_interleaved:
        block, order = (rows, columns // 2, 2), (2, 0, 1)
    elif factor > 1 and dim == 0:  # gates before ups: each is a block
        count *= factor
        block = (rows // factor, columns)
    elif factor > 1:
        block, order, cut = (rows, factor, columns // factor), (1, 0, 2), 2
    # The cut is along an expert's width: outputs of gates and ups, inputs of downs.
    is_transposed = first == 1 and name.endswith("up_proj" if dim else "down_proj")
    return MatrixForm(count, block, order, count_axis, (axis, cut), is_transposed)


class BlockPiece(NamedTuple):
    """What one rank holds of a block."""

    rank: int
    """In its replica."""
    place: int
    """Where it lies in the block, parts one after another."""
    numel: int
    offset: int
    """Where it lies in what the rank holds of the parameter."""


@dataclass(frozen=True)
class FlatMatrices:
    """The matrices of one parameter, and the flat buffer that it lies in."""

    form: MatrixForm
    group: GroupPlan
    start: int
    """Of the parameter in the flat buffer."""

    @classmethod
    def of(cls, group: GroupPlan, index: int, head_rows: int = 0) -> FlatMatrices:
        plan: ParamPlan = group.params[index]
        return cls(form_of(plan.name, plan.placement, head_rows), group, group.layout.segments[index].start)

    def cells(self, at: Coordinates) -> range:
        """Coordinates along the axis that cuts the count: each has blocks of its own."""
        return range(1 if self.form.count_axis is None else at.size(self.form.count_axis))

    def blocks(self, at: Coordinates) -> range:
        """Of one cell."""
        return range(self.form.count // len(self.cells(at)))

    def pieces(self, cell: int, block: int, at: Coordinates) -> Iterator[BlockPiece]:
        """Where a block lies, in the order of its elements."""
        length, num_parts = self.group.layout.slice_numel, self.form.num_parts(at)
        size = self.form.numel // num_parts
        for part in range(num_parts):
            low = self.start + block * size
            position = low
            while position < low + size:
                shard = position // length
                end = min(low + size, (shard + 1) * length)
                offset = position - max(shard * length, self.start)
                place = part * size + position - low
                yield BlockPiece(self._rank(shard, cell, part, at), place, end - position, offset)
                position = end

    def _rank(self, shard: int, cell: int, part: int, at: Coordinates) -> int:
        """In its replica, of the rank with these coordinates (:mod:`fsdmoe.core.axes` draws them)."""
        axis, form = self.group.axis, self.form
        if axis == Axis.FSDP_TP:
            return shard
        split = {} if form.count_axis is None else {form.count_axis: cell}
        split |= {} if form.block_cut is None else {form.block_cut[0]: part}
        if axis == Axis.FSDP:
            return shard * at.size(Axis.TP) + split.get(Axis.TP, 0)
        etp = at.size(Axis.ETP)
        outer, inner = (shard, split.get(Axis.ETP, 0)) if axis == Axis.EDP else divmod(shard, etp)
        return (outer * at.size(Axis.EP) + split.get(Axis.EP, 0)) * etp + inner
