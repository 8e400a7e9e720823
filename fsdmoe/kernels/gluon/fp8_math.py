"""Arithmetic that Gluon kernels in fp8 share; equal to ``triton/fp8_scale.py`` where it does the same."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def block_scale(amax, POWER_OF_TWO: gl.constexpr):
    """Of a block by its largest magnitude; a power of two is rounded up to, so that nothing clips."""
    # The quotient by 448 as a division rounds it, see ``triton/fp8_scale.py``.
    inverse: gl.constexpr = 1.0 / 448.0
    near = amax * inverse
    quotient = gl.fma(gl.fma(near, gl.full_like(near, -448.0), amax), gl.full_like(near, inverse), near)
    scale = gl.maximum(gl.where(amax < float("inf"), quotient, amax), 2.0**-100)
    if POWER_OF_TWO:
        scale = ((scale.to(gl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def reciprocal(x):
    """Of a scale, whose range needs no check, as a proper division has it: one instruction that is off by at
    most one bit, and a step of Newton's. A bit counts where codes are next to the middle between two."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 near, minus, rest;
        rcp.approx.ftz.f32 near, $1;
        neg.f32 minus, $1;
        fma.rn.f32 rest, minus, near, 0f3F800000;
        fma.rn.f32 $0, near, rest, near;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def sigmoid(x):
    """By one instruction, off by at most 2^-12, which is far below fp8's steps; exponential and division take
    about ten more, and these kernels are limited by arithmetic."""
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], dtype=gl.float32, is_pure=True, pack=1
    )
    return 0.5 * tanh + 0.5


@gluon.jit
def to_bf16(x):
    """Two numbers an instruction: one by one, as numbers are converted that are used in fp32 again, it would
    run at a quarter of the rate."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def rounded_to_bf16(x):
    """What other products see of a value: the recipe quantises what bf16 holds. By pairs, as above."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        cvt.rn.bf16x2.f32 both, $3, $2;
        shl.b32 $0, both, 16;
        and.b32 $1, both, 0xffff0000;
        }""",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def bf16_words(x):
    """``[M, N]`` -> ``[M, N/2]``, two numbers in bf16 a word. So they are held over a loop: each element of a
    tensor in bf16 would take a register of its own."""
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )
