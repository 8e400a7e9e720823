"""Weights in four bits: formats of torchao, their codes, and the values that codes stand for.

Two codes lie in a byte. Each *block* of consecutive elements has one or two bfloat16 numbers of its own::

    nf4     table[code] * scale            16 quantiles of a normal distribution; scale is the largest magnitude
    int4    code * scale + zero            code from -8 to 7, scale and zero from the block's range

Codes are bit for bit those of torchao's ``NF4Tensor`` and ``Int4Tensor`` for weights in bfloat16. NF4's
scales stay in bfloat16. torchao quantises them a second time, around their mean over the whole tensor, which
saves 3 % and would make the codes of a shard depend on all ranks.
"""  # noqa: E501

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

FourBitName = Literal["nf4", "int4"]
_NF4 = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
_INT4 = (*range(8), *range(-8, 0))  # two's complement
_CHUNK = 1 << 20  # elements at a time: sixteen distances each


class FourBit(NamedTuple):
    """How a weight is kept in four bits."""

    name: FourBitName
    block: int

    def table_on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """The number that each code stands for."""
        return torch.tensor(_NF4 if self.name == "nf4" else _INT4, dtype=dtype, device=device)

    @property
    def first_is_high(self) -> bool:
        """The first of two elements is in a byte's upper half."""
        return self.name == "nf4"

    @property
    def num_factors(self) -> int:
        """Numbers that a block has: a scale, or a scale and a zero."""
        return 1 if self.name == "nf4" else 2

    def factor_numel(self, numel: int) -> int:
        """Numbers that the blocks of so many elements have."""
        return numel // self.block * self.num_factors

    def bytes_of(self, numel: int) -> int:
        """What so many elements take, with the numbers of their blocks."""
        return numel // 2 + 2 * self.factor_numel(numel)


@torch.no_grad()
def encode(values: Tensor, form: FourBit, codes: Tensor, factors: Tensor) -> None:
    """Write the codes of flat ``values`` (whole blocks), and the factors of their blocks."""
    into = zip(codes.split(_CHUNK // 2), factors.split(form.factor_numel(_CHUNK)), strict=True)
    make = _encode_nf4 if form.name == "nf4" else _encode_int4
    for part, (own, numbers) in zip(values.split(_CHUNK), into, strict=True):
        nibbles, found = make(part.view(-1, form.block), form)
        numbers.copy_(found.flatten())
        first, second = nibbles.view(-1, 2).unbind(-1)
        high, low = (first, second) if form.first_is_high else (second, first)
        own.copy_(high << 4 | low)


def _encode_nf4(blocks: Tensor, form: FourBit) -> tuple[Tensor, Tensor]:
    scales = blocks.abs().amax(1).to(torch.bfloat16)
    # In the dtype of the weights, as torchao computes: in float32 some codes would differ.
    scaled = blocks / torch.where(scales == 0, 1, scales).to(blocks.dtype)[:, None]
    distances = (scaled[..., None] - form.table_on(blocks.device, blocks.dtype)).abs_()
    return distances.argmin(-1).to(torch.uint8), scales


def _encode_int4(blocks: Tensor, form: FourBit) -> tuple[Tensor, Tensor]:
    wide = blocks.float()
    lowest = wide.amin(1, keepdim=True)
    span = (wide.amax(1, keepdim=True) - lowest).clamp_(min=1e-6)
    scales = span / span.new_tensor(15)  # by a number, a GPU would multiply by its reciprocal: other bits
    codes = (wide - lowest).div_(scales).round_().clamp_(0, 15).to(torch.uint8)
    return codes.sub_(8).bitwise_and_(15), torch.cat([scales, lowest + scales * 8], 1)


@torch.no_grad()
def decode(codes: Tensor, factors: Tensor, form: FourBit, out: Tensor) -> Tensor:
    """Write the values of flat ``codes`` into flat ``out``: computed in float32, rounded once."""
    table = form.table_on(codes.device)
    numbers = factors.float().view(-1, form.num_factors)
    for part, into, own in zip(
        codes.split(_CHUNK // 2), out.split(_CHUNK), numbers.split(_CHUNK // form.block), strict=True
    ):
        halves = [part >> 4, part & 15]
        nibbles = torch.stack(halves if form.first_is_high else halves[::-1], -1)
        values = table[nibbles.int()].view(-1, form.block) * own[:, :1]
        into.copy_((values if form.num_factors == 1 else values + own[:, 1:]).flatten())
    return out
