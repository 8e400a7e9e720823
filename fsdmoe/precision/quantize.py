"""Quantisation in plain torch: what every quantising kernel must equal, and what runs where none can.

:func:`quantize` gives codes and scales, :func:`rounded` the values that they stand for. Both take an operand
as ``[rows, contraction]``, see :mod:`fsdmoe.precision.formats`, or several of them, each by itself, in dims
before these. Sizes: R rows, C contracted elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.precision.formats import E4M3, Element, Product, Scaling

SMALLEST_SCALE = 2.0**-100
"""Below it the inverse of a scale would overflow; such blocks have codes of zero."""


class Quantized(NamedTuple):
    """``values / scales`` on the grid of a format, and the scale of each block."""

    codes_RC: Tensor
    """On the element's grid, in float32."""
    scales_BB: Tensor
    """float32, a scale for each block of rows and contracted elements."""


def quantize(x_RC: Tensor, scaling: Scaling, scales_BB: Tensor | None = None) -> Quantized:
    """Codes and scales of an operand; blocks at the far edges may be smaller than the others. With scales
    that are given, what they are too small for becomes the largest number of the format, and what is
    infinite, scaled, not a number, which whoever skips steps must see."""
    x, is_given = x_RC.float(), scales_BB is not None
    if scales_BB is None:
        scales_BB = block_scales(block_amax(x, scaling.block), scaling)
    codes = _times_blocks(x, inverse_of(scales_BB), scaling.block)
    if is_given:
        codes = codes.masked_fill(codes.isinf(), torch.nan)
    return Quantized(round_to(codes, scaling.element, stochastic=scaling.stochastic), scales_BB)


def inverse_of(scales: Tensor) -> Tensor:
    """What values are multiplied by to give codes. Not a quotient: with few bits in values and scales many
    quotients lie in the middle between two codes, and kernels, which multiply, would round them elsewhere.
    A scale of zero belongs to a block of zeros, or to one too small for a two-level scale."""
    return torch.ones_like(scales).div(scales.clamp(min=SMALLEST_SCALE)).masked_fill(scales == 0, 0.0)


def dequantize(quantized: Quantized, scaling: Scaling) -> Tensor:
    """The float32 values that codes and scales stand for."""
    codes_RC, scales_BB = quantized
    return _times_blocks(codes_RC, scales_BB, scaling.block)


def rounded(x_RC: Tensor, scaling: Scaling) -> Tensor:
    """``x`` as its quantised form has it, in float32."""
    return dequantize(quantize(x_RC, scaling), scaling)


def rounded_product(first_MC: Tensor, second_NC: Tensor, product: Product) -> Tensor:
    """``first @ second.T`` of quantised operands, accumulated in float32: the definition."""
    if size := product.first.hadamard:
        first_MC, second_NC = _rotate(first_MC, size), _rotate(second_NC, size)
    first, second = rounded(first_MC, product.first), second_NC.float()
    if product.second is not None:
        second = rounded(second_NC, product.second)
    return first @ second.mT


def block_amax(x_RC: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """The largest magnitude of each block, ``[R / rows, C / columns]`` rounded up."""
    rows, columns = _extents(block, x_RC.shape)
    padding = (0, -x_RC.shape[-1] % columns, 0, -x_RC.shape[-2] % rows)
    padded = F.pad(x_RC.abs(), padding) if any(padding) else x_RC.abs()
    return _blocks_of(padded, rows, columns).amax((-3, -1))


def _extents(block: tuple[int | None, int | None], shape: Sequence[int]) -> tuple[int, int]:
    rows, columns = (size or max(1, extent) for size, extent in zip(block, shape[-2:], strict=True))
    return rows, columns


def _blocks_of(x_RC: Tensor, rows: int, columns: int) -> Tensor:
    num_rows, num_columns = x_RC.shape[-2] // rows, x_RC.shape[-1] // columns
    return x_RC.unflatten(-1, (num_columns, columns)).unflatten(-3, (num_rows, rows))


def _times_blocks(x_RC: Tensor, factors_BB: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """Each element times the factor of its block."""
    rows, columns = _extents(block, x_RC.shape)
    if x_RC.shape[-2] % rows or x_RC.shape[-1] % columns:
        return x_RC * spread_blocks(factors_BB, block, x_RC.shape)
    return (_blocks_of(x_RC, rows, columns) * factors_BB[..., :, None, :, None]).reshape(x_RC.shape)


def block_scales(amax_BB: Tensor, scaling: Scaling) -> Tensor:
    """What codes are multiplied by, from the largest magnitudes of their blocks. A block that is not finite
    stays so, whatever kind its scale is: skipped steps depend on it."""
    # By a tensor: on a GPU torch multiplies by the inverse of a number, which is off by a bit here and there.
    scales_BB = amax_BB.float() / torch.full_like(amax_BB, scaling.element.largest, dtype=torch.float32)
    if scaling.scale == "power_of_two":
        mantissa, exponent = torch.frexp(scales_BB)
        up = torch.where(mantissa == 0.5, exponent - 1, exponent)
        powers = torch.ldexp(torch.ones_like(scales_BB), up).masked_fill(scales_BB == 0, 0.0)
        return powers.masked_fill(~scales_BB.isfinite(), torch.nan)
    if scaling.scale == "two_level":
        whole = scales_BB.amax((-2, -1), keepdim=True) if scales_BB.numel() else scales_BB.sum()
        whole = whole.clamp(min=torch.finfo(torch.float32).tiny) / E4M3.largest
        return round_to(scales_BB / whole, E4M3) * whole
    return scales_BB


def spread_blocks(scales_BB: Tensor, block: tuple[int | None, int | None], shape: Sequence[int]) -> Tensor:
    """Each element's scale, from that of its block."""
    for dim, size in zip((-2, -1), block, strict=True):
        extent = shape[dim]
        scales_BB = scales_BB.repeat_interleave(size or max(1, extent), dim).narrow(dim, 0, extent)
    return scales_BB


def round_to(x: Tensor, element: Element, *, stochastic: bool = False) -> Tensor:
    """The nearest number of the format, ties to even; beyond the largest, the largest."""
    if element.dtype is not None and not stochastic:
        return x.clamp(-element.largest, element.largest).to(element.dtype).to(x.dtype)
    _, exponent = torch.frexp(x)
    steps = (exponent - 1).clamp(min=element.smallest_exponent) - element.mantissa_bits
    scaled = torch.ldexp(x, -steps)
    whole = torch.floor(scaled + torch.rand_like(scaled)) if stochastic else torch.round(scaled)
    return torch.ldexp(whole, steps).clamp(-element.largest, element.largest)


def _rotate(x_RC: Tensor, size: int) -> Tensor:
    """``size`` contracted elements at a time, by a Hadamard matrix with fixed random signs."""
    padded = F.pad(x_RC.float(), (0, -x_RC.shape[-1] % size))
    return (padded.unflatten(-1, (-1, size)) @ hadamard(size, x_RC.device)).flatten(-2)


@functools.cache
def hadamard(size: int, device: torch.device | None = None) -> Tensor:
    """An orthogonal matrix of +-1/sqrt(size), ``size`` a power of two; the same signs everywhere, always."""
    matrix = torch.ones(1, 1)
    for _ in range(int(math.log2(size))):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(2, (size, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return (signs * matrix / math.sqrt(size)).to(device)
