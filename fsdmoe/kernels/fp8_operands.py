"""Operands of matrix products in fp8, quantised from one matrix both ways round.

Matrix units want both operands with the contracted dim innermost. A layer's input ``x [T, K]`` is contracted
over K in forward and over T in the weight gradient, so it is quantised as it lies (``rows``) and transposed
(``transposed``); so are gradients and weights. What the scales belong to, and how they lie, is what
``torch``'s scaled products ask for:

==========  ====================  ============================================================================
``tensor``  ``[]``                one for the operand
``row``     ``[R]``               one a row
``block``   ``[C / 128, R]``      1 x 128
``square``  ``[R / 128, C/128]``  128 x 128
==========  ====================  ============================================================================

Tokens are padded with zeros to a multiple of 128, which every product takes, and so are the outputs of a
layer with scales of blocks (DeepSeek-V3's 576). Sizes: R rows, C contracted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fsdmoe.precision.formats import Product, Recipe, Scaling
from fsdmoe.precision.quantize import quantize, spread_blocks

BLOCK = 128
_ALIGNMENT = 16  # bytes, of every row of codes
Kind = Literal["tensor", "row", "block", "square"]
_KINDS: dict[tuple[int | None, int | None], Kind] = {
    (None, None): "tensor",
    (1, None): "row",
    (1, BLOCK): "block",
    (BLOCK, BLOCK): "square",
    (BLOCK, None): "square",  # one for all blocks of a row of blocks
}


class Operand(NamedTuple):
    """Codes with the contracted dim innermost, and their scales."""

    codes_RC: Tensor
    scales: Tensor
    kind: Kind

    def values(self) -> Tensor:
        """What it stands for, in float32."""
        codes, scales = self.codes_RC.float(), self.scales
        if self.kind == "row":
            scales = scales[:, None]
        elif self.kind == "block":
            scales = spread_blocks(scales.t(), (1, BLOCK), codes.shape)
        elif self.kind == "square":
            scales = spread_blocks(scales, (BLOCK, BLOCK), codes.shape)
        return codes * scales


class Wanted(NamedTuple):
    """One way round: how it is quantised, and its scales where they are known beforehand."""

    scaling: Scaling
    scales_BB: Tensor | None = None
    """A scale for each block, where blocks span the contraction; None: by what is quantised."""


class Both(NamedTuple):
    """A matrix as it lies and transposed, as far as wanted."""

    rows: Operand | None
    transposed: Operand | None


def takes_products(recipe: Recipe) -> bool:
    """Whether torch has products in fp8 of operands quantised so."""
    return all(_takes(product) for product in (recipe.forward, recipe.dgrad, recipe.wgrad))


def is_blockwise(recipe: Recipe) -> bool:
    return recipe.forward.first.block == (1, BLOCK)


def takes_shape(recipe: Recipe, num_outputs: int, num_inputs: int) -> bool:
    """Whether they take a weight of this shape, its outputs padded where scales are of blocks."""
    size = BLOCK if is_blockwise(recipe) else _ALIGNMENT
    return num_outputs % _ALIGNMENT == 0 and num_inputs % size == 0


def padding_of(recipe: Recipe, num_outputs: int) -> int:
    """Outputs of zeros that fill up the last block."""
    return -num_outputs % BLOCK if is_blockwise(recipe) else 0


def _takes(product: Product) -> bool:
    first, second = product.first, product.second or product.first
    for scaling in (first, second):
        if scaling.element.dtype is None or scaling.scale == "two_level":
            return False
        if scaling.stochastic or scaling.hadamard or scaling.block not in _KINDS:
            return False
    if first.element.name == second.element.name == "e5m2":
        return False  # matrix units multiply it with E4M3 alone
    pair = _KINDS[first.block], _KINDS[second.block]
    if not {"block", "square"} & set(pair):
        return True
    # Blocks of E5M2 are not among the products that torch tests.
    are_e4m3 = first.element.name == second.element.name == "e4m3"
    return are_e4m3 and pair in (("block", "square"), ("block", "block"))


def quantize_both_reference(
    x_RC: Tensor, rows: Wanted | None, transposed: Wanted | None, padded_rows: int
) -> Both:
    """The definition, in plain torch."""
    x = F.pad(x_RC, (0, 0, 0, padded_rows - len(x_RC)))
    return Both(_reference(x, rows), _reference(x.t(), transposed))


def _reference(x_RC: Tensor, wanted: Wanted | None) -> Operand | None:
    return None if wanted is None else as_operand(*quantize(x_RC, *wanted), wanted.scaling)


def as_operand(codes_RC: Tensor, scales_BB: Tensor, scaling: Scaling) -> Operand:
    """Codes and the scales of their blocks, as products want them."""
    assert scaling.element.dtype is not None
    kind, codes_RC = _KINDS[scaling.block], codes_RC.to(scaling.element.dtype).contiguous()
    if kind == "tensor":
        scales = scales_BB.reshape(())
    elif kind == "row":
        scales = scales_BB.reshape(-1)
    elif kind == "block":
        scales = scales_BB.t().contiguous()
    else:
        scales = scales_BB.expand(-1, -(-codes_RC.shape[1] // BLOCK)).contiguous()
    return Operand(codes_RC, scales, kind)


def scales_of_all_tokens(rows: Operand, transposed: Scaling) -> Tensor | None:
    """The scales of the transposed operand, where those of the rows determine them: the largest of several
    scales is the scale of the largest element. None where the elements must be looked at."""
    if rows.kind == "tensor" and transposed.block == (None, None):
        return rows.scales.view(1, 1)
    if rows.kind == "block" and transposed.block == (BLOCK, None):
        return rows.scales.amax(1, keepdim=True)
    return None
