"""The interface of engines that quantise operands and multiply them (``precision.backend``).

None in its place: the engine of this package (``kernels/fp8_linear.py``, ``kernels/gluon``, or emulation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Linear = Callable[[Tensor, Tensor], Tensor]
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """An engine's products by one recipe. Both are differentiable and quantise all of their operands."""

    engine: str
    """What messages call it."""
    linear: Linear
    """``(x, weight_NK)``: ``x @ weight.T``, any dims before the last."""
    grouped: Grouped | None
    """``(x_MK, weight_ENK, ends_E)``: rows of group e, up to ``ends_E[e]``, times ``weight_ENK[e].T``; None
    where the recipe has none. What lies past the last end is not read, and undefined in the result."""
    align: int
    """Rows of a group are a multiple of it."""
    width: int
    """So are all widths of weights."""
