"""Gluon under one set of names: its interface is experimental, and changes between releases of Triton.

Written against Triton 3.6 (torch 2.11) and 3.9. Everything that differs between them stands here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
_HALVES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def as_fp8(buffer, desc):
        """The first half of a [64, 128] buffer in bf16 as one in fp8, laid out as the descriptor's."""
        return buffer.reinterpret(gl.float8e4nv, [64, 128], desc.layout)

    @gluon.jit
    def as_words(buffer):
        """A [64, 128] buffer in bf16, two numbers a word; the bytes lie as they did."""
        return buffer.reinterpret(gl.int32, [64, 64], _WORDS)

    @gluon.jit
    def as_bf16(buffer, ROWS: gl.constexpr):
        """A [ROWS, 128] buffer in fp8 as one of [ROWS, 64] in bf16; the bytes lie as they did."""
        return buffer.reinterpret(gl.bfloat16, [ROWS, 64], _HALVES)

else:

    @gluon.jit
    def as_fp8(buffer, desc):
        """The first half of a [64, 128] buffer in bf16 as one in fp8, laid out as the descriptor's."""
        return buffer._reinterpret(gl.float8e4nv, [64, 128], desc.layout)

    @gluon.jit
    def as_words(buffer):
        """A [64, 128] buffer in bf16, two numbers a word; the bytes lie as they did."""
        return buffer._reinterpret(gl.int32, [64, 64], _WORDS)

    @gluon.jit
    def as_bf16(buffer, ROWS: gl.constexpr):
        """A [ROWS, 128] buffer in fp8 as one of [ROWS, 64] in bf16; the bytes lie as they did."""
        return buffer._reinterpret(gl.bfloat16, [ROWS, 64], _HALVES)


block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
