"""The interface of libraries that quantise operands and multiply them (``precision.backend``).

None in its place: the kernels of this package (``kernels/fp8_linear.py``, ``kernels/gluon``, or emulation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor], Tensor]
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """A library's products by one recipe. Both are differentiable and quantise all of their operands."""

    library: str
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


def with_filled_rows(linear: Linear, align: int) -> Linear:
    """A linear product whose rows, which weight gradients contract, are filled up with zeros to a multiple of
    ``align``."""

    def filled_up(x: Tensor, weight_NK: Tensor) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        missing = -len(x_TK) % align
        y_TN = linear(F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK, weight_NK)
        return y_TN[: len(x_TK)].view(*x.shape[:-1], len(weight_NK))

    return filled_up
