"""A weight in codes as one object: the parameter that its layer holds, with the scales of its blocks.

::

    quantize_for_gather   a layer asks for codes of a weight, before the model is sharded
    QuantizedWeight       the engine gives it the codes, for life, in the buffer that they are gathered into
    scales_of             whoever computes with a weight asks once what it is

A scale belongs to a *tile* of 128 x 128 elements, which whoever has the tile can find, or to a whole matrix,
which all of it must be looked at for. Codes lie as the weight does, and transposed too where backward wants
them so. :class:`WeightCodes` and :class:`WeightRange` say where kernels write those that a rank holds. Frozen
weights may have codes of four bits, two in a byte (:mod:`fsdmoe.precision.four_bit`).

Autograd and recompute pass codes on as plain tensors, so a function that needs the scales later keeps them
next to what it saves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from fsdmoe.precision import four_bit
from fsdmoe.precision.formats import Scaling
from fsdmoe.precision.four_bit import FourBit

TILE = 128


class WeightCoding(NamedTuple):
    """How a weight is quantised where it is sharded."""

    scaling: Scaling | FourBit
    transposed: bool = False
    """A rank that holds all of it keeps its codes transposed too, as backward reads them."""


def quantize_for_gather(layer: nn.Module, name: str, coding: WeightCoding) -> None:
    """Ask for codes of a weight that is sharded later: its shards, and what is gathered of them."""
    vars(layer).setdefault("weight_codings", {})[name] = coding


def weight_coding(places: Iterable[tuple[nn.Module, str]]) -> WeightCoding | None:
    """What :func:`quantize_for_gather` asked for, of a weight that is registered at ``places``."""
    found = (vars(layer).get("weight_codings", {}).get(name) for layer, name in places)
    return next((coding for coding in found if coding is not None), None)


class WeightScales(NamedTuple):
    """The scales of a quantised weight: of blocks of its last two dims."""

    scales: Tensor
    """``[..., row blocks, column blocks]``; of codes in four bits ``[..., rows, column blocks, factors]``."""
    block: tuple[int, int]
    transposed: Tensor | None = None
    """The codes with their last two dims exchanged, where they are kept so too."""
    four_bit: FourBit | None = None
    """Of codes in four bits: two lie in a byte, so the last dim is half as long as the weight's."""
    table: Tensor | None = None
    """Of those: the numbers that codes stand for, on their device."""

    def shape_of(self, codes: Tensor) -> tuple[int, ...]:
        """Of the weight."""
        *others, last = codes.shape
        return (*others, last if self.four_bit is None else 2 * last)


class QuantizedWeight(nn.Parameter):
    """Codes of a weight: its values are codes times the scale of their block."""

    scales: WeightScales

    def __new__(cls, codes: Tensor, requires_grad: bool = True, *, scales: WeightScales) -> QuantizedWeight:
        weight = super().__new__(cls, codes, requires_grad)
        weight.scales = scales
        return weight

    # A parameter's own would make one without its scales, whose codes would be read as values.

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) not in memo:
            scales = copy.deepcopy(self.scales, memo)
            memo[id(self)] = QuantizedWeight(self.detach().clone(), self.requires_grad, scales=scales)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        return _made_again, (self.detach(), self.requires_grad, self.scales)


def _made_again(codes: Tensor, requires_grad: bool, scales: WeightScales) -> QuantizedWeight:
    return QuantizedWeight(codes, requires_grad, scales=scales)


def scales_of(weight: Tensor) -> WeightScales | None:
    """The scales of a quantised weight; None for any other tensor."""
    return weight.scales if isinstance(weight, QuantizedWeight) else None


def decoded(weight: Tensor, scales: WeightScales | None, dtype: torch.dtype) -> Tensor:
    """What codes stand for: exact in float32, rounded once to ``dtype``. Without scales the weight itself."""
    if scales is None:
        return weight
    if scales.four_bit is not None:
        values = weight.new_empty(scales.shape_of(weight), dtype=dtype)
        four_bit.decode(weight.view(-1), scales.scales.view(-1), scales.four_bit, values.view(-1))
        return values
    rows, columns = weight.shape[-2:]
    height, width = scales.block
    values = weight.to(dtype)  # exact: E4M3 has four significant bits
    by_column = scales.scales.repeat_interleave(width, -1)[..., :columns]
    if rows % height:
        index = torch.arange(rows, device=weight.device) // height
        return values.mul_(by_column.index_select(-2, index))
    # In place and by a broadcast factor: nothing else of the size of the weight is made.
    values.unflatten(-2, (-1, height)).mul_(by_column.unsqueeze(-2))
    return values


class WeightCodes(NamedTuple):
    """Where they are written. Sizes: E matrices, A rows, B columns."""

    plain_EAB: Tensor
    transposed_EBA: Tensor | None
    scales: Tensor
    """``[E, A / 128, B / 128]``, or ``[E, 1, 1]``."""
    power_of_two: bool

    @property
    def by_tiles(self) -> bool:
        """Each tile has a scale of its own."""
        num_matrices, rows, columns = self.plain_EAB.shape
        return self.scales.shape == (num_matrices, rows // TILE, columns // TILE)


class WeightRange(NamedTuple):
    """What a rank holds of a weight ``[..., rows, columns]``: elements counted through all of it."""

    start: int
    end: int
    rows: int
    columns: int
    by_tiles: bool
    """Else a scale belongs to a whole matrix."""
