"""The codes of a weight that one rank holds whole, and how they are made of its main values.

A scale belongs to a *tile* of 128 x 128 elements, which whoever has the tile can find, or to a whole matrix,
which all of it must be looked at for. Codes lie as the weight does, and transposed too where backward wants
them so.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

TILE = 128


class WeightCodes(NamedTuple):
    """Where they are written. Sizes: E matrices, A rows, B columns."""

    plain_EAB: Tensor
    turned_EBA: Tensor | None
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


def takes_codes(shape_EAB: tuple[int, ...]) -> bool:
    """Whether the kernels take matrices of this shape."""
    return shape_EAB[-2] % TILE == 0 and shape_EAB[-1] % TILE == 0
