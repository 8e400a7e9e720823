"""Weights that are sent quantised: the scales of their blocks, which may be cut over several ranks.

Codes lie in the flat shard and are gathered like any other weights. A block (128 x 128, say) is anchored in
its parameter, while a rank holds a flat range of it, so a block may lie on several ranks::

    measure   the largest magnitude of each block in this rank's range
    reduce    the maximum over the shard group
    encode    scales, whole on every rank; codes of this rank's range
    gather    codes alone: half the bytes of bf16

Maxima do not depend on the order of ranks or on the cut, so codes and scales are the same bits under every
number of ranks. Scales are a sixteen-thousandth of the elements.

Where one rank holds a group alone nothing is cut: kernels make codes and scales of whole weights in one pass
(:mod:`fsdmoe.precision.quantized_weight`), or an optimizer does where it writes the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.plan import ParamPlan
from fsdmoe.kernels.backend import triton_for
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import block_amax, block_scales, inverse_of, spread_blocks
from fsdmoe.precision.quantized_weight import TILE, WeightCodes, WeightRange, WeightScales

_CHUNK = 1 << 22  # elements at a time


@dataclass(frozen=True)
class _Blocks:
    """The blocks of one parameter: its last two dims are cut, all others count matrices."""

    rows: int
    columns: int
    block: tuple[int, int]
    scales: torch.Tensor
    """``[matrices * row blocks, column blocks]``, a view of the group's."""

    def row_blocks(self, first: int, num_rows: int) -> torch.Tensor:
        """Which row of ``scales`` each of some rows has; they are counted through all matrices."""
        rows = torch.arange(first, first + num_rows, device=self.scales.device)
        per_matrix = -(-self.rows // self.block[0])
        return rows // self.rows * per_matrix + rows % self.rows // self.block[0]

    def spread(self, numbers: torch.Tensor, part: _Rectangle) -> torch.Tensor:
        """Each element's of some numbers that blocks have (``scales``, or their inverse)."""
        own = numbers[self.row_blocks(part.row, len(part.values))]
        rows = spread_blocks(own, (1, self.block[1]), (len(own), self.columns))
        return rows[:, part.column : part.column + part.values.shape[1]]


class BlockScales:
    """The scales of one group's parameters, and how codes are made of main weights with them."""

    def __init__(
        self,
        plans: Sequence[ParamPlan],
        owned: list[OwnedRange],
        device: torch.device,
        transposed: torch.Tensor | None = None,
    ) -> None:
        """``owned``: this rank's range of each parameter; ``transposed``: a flat buffer, as the shard is, for
        codes that are transposed."""
        assert isinstance(plans[0].scaling, Scaling)
        self._scaling, self._owned = plans[0].scaling, owned
        grids = [_grid(plan.local_shape, self._scaling) for plan in plans]
        sizes = [torch.Size(shape).numel() for shape, _ in grids]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.scales: list[WeightScales] = []
        """Of each parameter; views of the flat tensor."""
        self._blocks: list[_Blocks] = []
        pieces = self._flat.split(sizes)
        for plan, held, piece, (shape, block) in zip(plans, owned, pieces, grids, strict=True):
            *matrices, rows, columns = plan.local_shape
            other = None
            if transposed is not None:
                other = held.of(transposed).view(*matrices, columns, rows)
            self.scales.append(WeightScales(piece.view(shape), block, other))
            self._blocks.append(_Blocks(rows, columns, block, piece.view(-1, shape[-1])))

    def _range(self, blocks: _Blocks, piece: OwnedRange) -> WeightRange | None:
        """For kernels; None where blocks are not theirs."""
        if not self._has_kernels(blocks):
            return None
        by_tiles = blocks.block == (TILE, TILE)
        return WeightRange(piece.start, piece.end, blocks.rows, blocks.columns, by_tiles)

    def whole(self, codes: torch.Tensor) -> list[WeightCodes] | None:
        """Where kernels write the codes of whole weights; None where a weight is cut, or its blocks are not
        theirs. ``codes``: the shard."""
        found = []
        for blocks, scales, held in zip(self._blocks, self.scales, self._owned, strict=True):
            shape = (-1, blocks.rows, blocks.columns)
            own = scales.scales.view(-1, *scales.scales.shape[-2:])
            is_whole = held.numel == len(own) * blocks.rows * blocks.columns
            if not (is_whole and self._has_kernels(blocks)):
                return None
            plain = held.of(codes).view(shape)
            other = scales.transposed
            if other is not None:
                other = other.view(-1, blocks.columns, blocks.rows)
            found.append(WeightCodes(plain, other, own, self._scaling.scale == "power_of_two"))
        return found

    def _has_kernels(self, blocks: _Blocks) -> bool:
        is_known = self._scaling.element == E4M3 and self._scaling.scale in ("float32", "power_of_two")
        are_tiles = blocks.rows % TILE == blocks.columns % TILE == 0
        return is_known and are_tiles and blocks.block in ((TILE, TILE), (blocks.rows, blocks.columns))

    @torch.no_grad()
    def measure(self, main: torch.Tensor) -> torch.Tensor:
        """The largest magnitudes of all blocks in this rank's main weights; what comes back is to be made the
        maximum over the shard group in place, before :meth:`encode`."""
        self._flat.zero_()
        fused = triton_for(main)
        for blocks, piece in zip(self._blocks, self._owned, strict=True):
            if fused is not None and piece.numel and (held := self._range(blocks, piece)) is not None:
                fused.measure_range_(piece.of(main), held, blocks.scales)
                continue
            for part in _rectangles(main, piece, blocks.columns):
                for chunk in part.chunks():
                    self._add_largest(blocks, chunk)
        return self._flat

    @torch.no_grad()
    def encode(self, main: torch.Tensor, codes: torch.Tensor) -> None:
        """Scales from what was measured, and this rank's codes."""
        self._flat.copy_(block_scales(self._flat, self._scaling))
        fused = triton_for(main)
        for blocks, piece in zip(self._blocks, self._owned, strict=True):
            if fused is not None and piece.numel and (held := self._range(blocks, piece)) is not None:
                fused.encode_range_(piece.of(main), held, inverse_of(blocks.scales), piece.of(codes))
                continue
            into = _rectangles(codes, piece, blocks.columns)
            for part, out in zip(_rectangles(main, piece, blocks.columns), into, strict=True):
                for chunk, place in zip(part.chunks(), out.chunks(), strict=True):
                    self._write_codes(blocks, chunk, place.values)
        for found, piece in zip(self.scales, self._owned, strict=True):
            if found.transposed is not None:
                plain = piece.of(codes).view(torch.uint8)
                found.transposed.view(torch.uint8).copy_(plain.view(found.transposed.mT.shape).mT)

    @torch.no_grad()
    def decode(self, codes: torch.Tensor, main: torch.Tensor) -> None:
        """The values of this rank's codes."""
        for blocks, piece in zip(self._blocks, self._owned, strict=True):
            into = _rectangles(main, piece, blocks.columns)
            for part, out in zip(_rectangles(codes, piece, blocks.columns), into, strict=True):
                for chunk, place in zip(part.chunks(), out.chunks(), strict=True):
                    rows = blocks.spread(blocks.scales, chunk)
                    place.values.copy_(chunk.values.float() * rows)

    def _add_largest(self, blocks: _Blocks, part: _Rectangle) -> None:
        width = blocks.block[1]
        # Padded on the left, so that blocks fall where they do in the whole parameter.
        padded = torch.nn.functional.pad(part.values.float(), (part.column % width, 0))
        amax = block_amax(padded, (1, width))
        first = part.column // width
        index = blocks.row_blocks(part.row, len(amax))[:, None].expand_as(amax)
        blocks.scales[:, first : first + amax.shape[1]].scatter_reduce_(0, index, amax, "amax")

    def _write_codes(self, blocks: _Blocks, part: _Rectangle, out: torch.Tensor) -> None:
        scaled = part.values.float() * blocks.spread(inverse_of(blocks.scales), part)
        largest = self._scaling.element.largest
        out.copy_(scaled.clamp(-largest, largest))


def _grid(shape: Sequence[int], scaling: Scaling) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shape of a parameter's scales, and the size of its blocks."""
    *matrices, rows, columns = shape
    block = (scaling.block[0] or rows, scaling.block[1] or columns)
    return (*matrices, -(-rows // block[0]), -(-columns // block[1])), block


@dataclass(frozen=True)
class _Rectangle:
    """A range of whole rows, or a part of one row."""

    row: int
    column: int
    values: torch.Tensor

    def chunks(self) -> Iterator[_Rectangle]:
        """A few rows at a time, so that what is computed from them is small compared with the weights."""
        step = max(1, _CHUNK // max(1, self.values.shape[1]))
        for start in range(0, len(self.values), step):
            yield _Rectangle(self.row + start, self.column, self.values[start : start + step])


def _rectangles(flat: torch.Tensor, piece: OwnedRange, columns: int) -> Iterator[_Rectangle]:
    """This rank's range of a parameter in at most three: the rest of a row, whole rows, the start of one."""
    position = piece.start
    while position < piece.end:
        row, column = divmod(position, columns)
        if column or piece.end - position < columns:
            length, width = min(columns - column, piece.end - position), 0
        else:
            length, width = (piece.end - position) // columns * columns, columns
        offset = piece.offset + position - piece.start
        values = flat[offset : offset + length]
        yield _Rectangle(row, column, values.view(-1, width or length))
        position += length
