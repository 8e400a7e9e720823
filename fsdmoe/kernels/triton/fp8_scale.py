"""What quantising kernels in fp8 share: the scale of a block, codes, and transposed tiles.

Equal to :mod:`fsdmoe.precision.quantize`, but that a block of zeros, or of less than 448 x 2^-100, has the
scale 2^-100, so that nothing is divided by zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
BLOCK = 128
"""Elements that share a scale, along each blocked dim; rows of a panel."""
STRIDE = tl.constexpr(32)
"""Of tiles of 128 x 128 that are stored as they lie and transposed: see :func:`interleaved`."""


@triton.jit
def block_scale(amax, POWER_OF_TWO: tl.constexpr, LARGEST: tl.constexpr = 448.0):
    """Of a block by its largest magnitude and the format's; a power of two is rounded up to, so that nothing
    clips."""
    # The quotient, rounded as a division rounds it: a product with the reciprocal and the correction of its
    # error are a third of a division's instructions. An infinity stays one.
    inverse: tl.constexpr = 1.0 / LARGEST
    near = amax * inverse
    quotient = tl.fma(tl.fma(near, -LARGEST, amax), inverse, near)
    scale = tl.maximum(tl.where(amax < float("inf"), quotient, amax), 2.0**-100)
    if POWER_OF_TWO:
        # By the bits: a logarithm is not exact next to a power of two.
        scale = ((scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def raise_to(ptr, value):
    """Make a magnitude that stands there at least ``value``. As integers, which compare as they do."""
    tl.atomic_max(ptr, value.to(tl.int32, bitcast=True))


@triton.jit
def to_codes(scaled):
    """fp8 as bytes, which any pointer and any permutation takes; the conversion saturates."""
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_codes(codes):
    """float32 of bytes that are fp8."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def hidden_one(size):
    """1, which the compiler does not know: a scale times it makes codes that are converted again. Of codes
    that are stored and transposed, Triton 3.6 for Hopper has a third wrong in the transpose: the first two of
    each four, which are converted in one instruction, hold what was in that register before."""
    return tl.where(size > 0, 1.0, 0.0)


@triton.jit
def interleaved():
    """Tile row i -> token of the block of 128. A thread holds rows i = a + STRIDE b, which become the tokens
    (128 / STRIDE) a + b: neighbours, so that its transposed copy is written in pieces of several bytes."""
    i = tl.arange(0, 128)
    return (i % STRIDE) * (128 // STRIDE) + i // STRIDE


@triton.jit
def transposed_tile(codes, STRIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """[interleaved token, column] -> [column, token / 4], four codes in a word: those of a thread become one
    in its registers, which passes through shared memory in a fraction of the time. Not of codes that are
    stored as they lie too: see :func:`hidden_one`."""
    bits = codes.to(tl.int32).reshape(32 // STRIDE, 4, STRIDE, COLUMNS)
    words = tl.sum(bits << (8 * tl.arange(0, 4))[None, :, None, None], axis=1)
    return words.permute(2, 1, 0).reshape(COLUMNS, 32)


@triton.jit
def transposed_codes(scaled, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """:func:`transposed_tile` of what is yet to become codes: a word is two conversions and a move, where
    code by code it takes about sixteen instructions, most of what a kernel does."""
    if INTERPRETED:  # which knows no instructions of a GPU
        return transposed_tile(to_codes(scaled), STRIDE, COLUMNS)
    else:
        pairs = scaled.reshape(32 // STRIDE, 2, 2, STRIDE, COLUMNS).permute(0, 3, 4, 1, 2)
        even, odd = tl.split(pairs)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return words.permute(2, 1, 0).reshape(COLUMNS, 32)


@triton.jit
def as_words(ptr):
    """Bytes, of which four codes are a word. Their place in memory must be a multiple of four."""
    return ptr.to(tl.pointer_type(tl.int32))


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def as_bits(magnitudes: torch.Tensor) -> torch.Tensor:
    """For :func:`raise_to`."""
    return magnitudes.view(torch.int32)
