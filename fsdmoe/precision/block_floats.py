"""Moments in eight bits: blocks of 64 elements that share the exponent of their largest.

::

    first moment    sign, 7 bits    3 of mantissa: nearly 15 octaves below the block's largest, then zero
    second moment   8 bits          3 of mantissa: nearly 31 octaves below it; what is smaller is kept as the
                                    smallest code, never as zero, so no update is ever divided by nothing
    a block         1 byte          the exponent of its largest element, as float32 writes it

A code is the top of a float32's own bits (exponent and three bits of mantissa), counted from the block's
exponent, so coding is integer arithmetic and gives the same bits on every device.

Rounding is stochastic, up or down in proportion, so values are right on average: the nearest code would leave
a moment where it is whenever a step moves it by less than half a code. The random bits are drawn from the
parameter, the step and the *place of the element in the whole parameter* (:class:`ElementPlace`): no rank,
cut or order has a part in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 64
SHIFT = 20  # bits of a float32 that a code leaves out
SIGNED_ZERO, UNSIGNED_ZERO = 120, 248
"""What is added to a code's distance from the block's exponent, so that the largest code is the last one."""

THIRD = 0x5BD1E995  # makes other random bits of those that the moments use
_LARGEST = 0x7F800000  # the bits of infinity
_STEP_FACTOR, _MIX1, _MIX2 = (n - (1 << 32) if n >> 31 else n for n in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))


@dataclass(frozen=True)
class ElementPlace:
    """Where a rank's elements of a parameter lie in the whole of it, flattened: element ``i`` of the local
    tensor is element ``i // run * stride + i % run + offset``."""

    salt: int
    """Of the parameter, 31 bits: another number for each."""
    start: int
    """The first of the elements in the local tensor; a multiple of the block, as ``run`` is if it repeats."""
    run: int
    """Elements of the local tensor that lie side by side in the whole one."""
    stride: int
    offset: int

    def after(self, num_elements: int) -> ElementPlace:
        """The place of what follows so many elements, whole blocks of them."""
        return ElementPlace(self.salt, self.start + num_elements, self.run, self.stride, self.offset)

    def indices(self, num_elements: int, device: torch.device) -> torch.Tensor:
        """Where each element lies, modulo 2^32."""
        local = torch.arange(self.start, self.start + num_elements, BLOCK, device=device)
        blocks = local // self.run * self.stride + local % self.run + self.offset
        lanes = torch.arange(BLOCK, dtype=torch.int32, device=device)
        return (blocks.to(torch.int32)[:, None] + lanes).flatten()[:num_elements]


@dataclass(frozen=True)
class BlockFloats:
    """A flat run of elements, blocks from its start."""

    codes: torch.Tensor
    """uint8, one an element."""
    exponents: torch.Tensor
    """uint8, one a block."""

    def __getitem__(self, part: slice) -> BlockFloats:
        """``part`` begins at a block."""
        start, stop, _ = part.indices(self.codes.numel())
        return BlockFloats(self.codes[start:stop], self.exponents[start // BLOCK : num_blocks(stop)])


Moment = torch.Tensor | BlockFloats


def num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def random_bits(
    place: ElementPlace, step: torch.Tensor, num_elements: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three numbers of 16 bits for every element, from its place in the parameter and the step: for both
    moments and for the main weight."""
    key = _mix(step.to(torch.int32) * _STEP_FACTOR + place.salt)
    mixed = _mix(place.indices(num_elements, step.device) ^ key)
    return mixed & 0xFFFF, (mixed >> 16) & 0xFFFF, _mix(mixed + THIRD) & 0xFFFF


def round_stochastically(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 values as ones that bfloat16 has: the one below or above, in proportion, as 16 bits decide."""
    rounded = (values.view(torch.int32) + random).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values == values, rounded, values)  # a GPU's NaN, 0x7FFFFFFF, would carry over to -0


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits; torch has no unsigned shifts, so what they drag in is masked."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * _MIX1
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _MIX2
    return bits ^ ((bits >> 16) & 0xFFFF)


def encode(values: torch.Tensor, random: torch.Tensor, *, signed: bool) -> BlockFloats:
    """Code fp32 values; ``random``: 16 bits an element that decide whether it is rounded up."""
    bits = _in_blocks(values.view(torch.int32))
    magnitude = (bits & 0x7FFFFFFF).clamp_(max=_LARGEST)
    rounded = (_in_blocks(random) << (SHIFT - 16)).add_(magnitude).bitwise_right_shift_(SHIFT)
    exponents = rounded.amax(1) >> 3
    codes = rounded.sub_((exponents << 3)[:, None])
    if signed:
        codes = codes.add_(SIGNED_ZERO).clamp_(min=0).bitwise_or_((bits < 0).int() << 7)
    else:
        codes = codes.add_(UNSIGNED_ZERO).clamp_(min=1).mul_(magnitude > 0)
    return BlockFloats(codes.to(torch.uint8).flatten()[: values.numel()], exponents.to(torch.uint8))


def decode(coded: BlockFloats, *, signed: bool) -> torch.Tensor:
    """The values, in fp32."""
    codes = _in_blocks(coded.codes).int()
    magnitude = codes & 0x7F if signed else codes
    shared = (coded.exponents.int() << 3) - (SIGNED_ZERO if signed else UNSIGNED_ZERO)
    bits = (magnitude + shared[:, None]).clamp_(min=1).mul_(magnitude > 0).bitwise_left_shift_(SHIFT)
    if signed:
        bits |= (codes & 0x80) << 24
    return bits.flatten()[: coded.codes.numel()].view(torch.float32)


def _in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """Blocks as rows, the last one filled up with zeros."""
    missing = -flat.numel() % BLOCK
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def read(moment: Moment, *, signed: bool) -> torch.Tensor:
    """A moment in fp32."""
    return decode(moment, signed=signed) if isinstance(moment, BlockFloats) else moment.float()
