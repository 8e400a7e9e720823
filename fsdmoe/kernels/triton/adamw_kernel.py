"""AdamW over flat buffers in one pass: main weights, both moments and the bf16 weights, each touched once.

    m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²
    w = w (1 − lr · decay) − lr · m / (1 − β1^t) / (sqrt(v / (1 − β2^t)) + ε);  weight = bf16(w)

Arithmetic is fp32 whatever main weights, gradients and moments are stored in. Step count and the
"found an infinity" flag live on the device, so a step neither waits for it nor is decided on the host: with
the flag set nothing changes.

Stochastic rounding is for moments in eight bits, one of them or both, and for main weights in bfloat16.
Codes, shared exponents and how they are rounded are :mod:`fsdmoe.precision.block_floats`'s; that update's
reference is in :mod:`fsdmoe.kernels.adamw_step`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv
from fsdmoe.precision import block_floats
from fsdmoe.precision.block_floats import BlockFloats, ElementPlace, Moment

_ROWS = tl.constexpr(32)  # blocks of elements a program
_WIDTH = tl.constexpr(block_floats.BLOCK)
_SHIFT = tl.constexpr(block_floats.SHIFT)
_SIGNED_ZERO = tl.constexpr(block_floats.SIGNED_ZERO)
_UNSIGNED_ZERO = tl.constexpr(block_floats.UNSIGNED_ZERO)
_THIRD = tl.constexpr(block_floats.THIRD)
_LARGEST = tl.constexpr(0x7F800000)


@triton.jit
def _one_minus_exp(x):
    """1 − exp(x) for x ≤ 0 without cancellation near zero, where the first steps' corrections are."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, series, 1 - tl.exp(x))


@triton.jit
def is_skipped(found_inf_ptr, HAS_FLAG: tl.constexpr):
    skipped = False
    if HAS_FLAG:
        skipped = tl.load(found_inf_ptr) > 0
    return skipped


@triton.jit
def load_step(step_ptr, lr, log_beta1, log_beta2):
    """The step's number, the rate with the first moment's correction, the second's correction."""
    step = tl.load(step_ptr)
    return step, lr / _one_minus_exp(step * log_beta1), _one_minus_exp(step * log_beta2)


@triton.jit
def _mix(bits):
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _decode(codes, exponents, SIGNED: tl.constexpr):
    codes = codes.to(tl.int32)
    shared = exponents.to(tl.int32)[:, None] << 3
    if SIGNED:
        magnitude = codes & 0x7F
        bits = tl.maximum(magnitude + shared - _SIGNED_ZERO, 1) << _SHIFT
    else:
        magnitude = codes
        bits = tl.maximum(magnitude + shared - _UNSIGNED_ZERO, 1) << _SHIFT
    values = tl.where(magnitude > 0, bits, 0).to(tl.float32, bitcast=True)
    if SIGNED:
        values = tl.where(codes > 127, -values, values)
    return values


@triton.jit
def _load(ptr, exponents_ptr, at, inside, block, has_block, SMALL: tl.constexpr, SIGNED: tl.constexpr):
    if SMALL:
        exponents = tl.load(exponents_ptr + block, mask=has_block)
        values = _decode(tl.load(ptr + at, mask=inside), exponents, SIGNED)
    else:
        values = tl.load(ptr + at, mask=inside).to(tl.float32)
    return values


@triton.jit
def _store(
    ptr,
    exponents_ptr,
    values,
    random,
    at,
    inside,
    block,
    has_block,
    SMALL: tl.constexpr,
    SIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    if SMALL:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, _LARGEST)
        rounded = (magnitude + (random.to(tl.int32) << (_SHIFT - 16))) >> _SHIFT
        largest = rounded
        if MASKED:  # past the end nothing was loaded, and nothing must raise the last block's exponent
            largest = tl.where(inside, rounded, 0)
        exponents = tl.max(largest, axis=1) >> 3
        codes = rounded - (exponents << 3)[:, None]
        if SIGNED:
            codes = tl.maximum(codes + _SIGNED_ZERO, 0) | tl.where(bits < 0, 128, 0)
        else:
            codes = tl.where(magnitude > 0, tl.maximum(codes + _UNSIGNED_ZERO, 1), 0)
        tl.store(ptr + at, codes.to(tl.uint8), mask=inside)
        tl.store(exponents_ptr + block, exponents.to(tl.uint8), mask=has_block)
    else:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _random(salt, step, start, run, stride, offset, block):
    """32 bits for every element of some blocks; a block lies in one run."""
    local = start + block * _WIDTH
    whole = local // run * stride + local % run + offset
    index = whole.to(tl.uint32)[:, None] + tl.arange(0, _WIDTH).to(tl.uint32)[None, :]
    steps = (tl.zeros([1, _WIDTH], tl.float32) + step).to(tl.uint32)
    key = _mix(steps * 0x9E3779B1 + salt.to(tl.uint32))
    return _mix(index ^ key)


@triton.jit
def update_block(
    main_ptr,
    grad_ptr,
    first_ptr,
    first_exponents_ptr,
    second_ptr,
    second_exponents_ptr,
    weight_ptr,
    random,
    settings,
    at,
    inside,
    block,
    has_block,
    FIRST_SMALL: tl.constexpr,
    SECOND_SMALL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Some blocks, and their new main weights; of ``settings``, the rate is already divided by the first
    moment's correction."""
    lr, beta1, beta2, rest1, rest2, correction2, eps, decay = settings
    grad = tl.load(grad_ptr + at, mask=inside).to(tl.float32)
    main = tl.load(main_ptr + at, mask=inside).to(tl.float32)
    old = _load(first_ptr, first_exponents_ptr, at, inside, block, has_block, FIRST_SMALL, True)
    first = beta1 * old + rest1 * grad
    old = _load(second_ptr, second_exponents_ptr, at, inside, block, has_block, SECOND_SMALL, False)
    second = beta2 * old + rest2 * grad * grad
    main = main * decay - lr * first / (tl.sqrt(second / correction2) + eps)
    if STOCHASTIC:
        bits = main.to(tl.uint32, bitcast=True) + (_mix(random + _THIRD) & 0xFFFF)
        rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        main = tl.where(main == main, rounded, main)  # a GPU's NaN, 0x7FFFFFFF, would carry over to -0
    tl.store(main_ptr + at, main.to(main_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(weight_ptr + at, main.to(weight_ptr.dtype.element_ty), mask=inside)
    _store(
        first_ptr, first_exponents_ptr, first, random & 0xFFFF, at, inside, block, has_block, FIRST_SMALL,
        True, MASKED,
    )  # fmt: skip
    _store(
        second_ptr, second_exponents_ptr, second, random >> 16, at, inside, block, has_block, SECOND_SMALL,
        False, MASKED,
    )  # fmt: skip
    return main


@QuickLaunch
@triton.jit(do_not_specialize=["num_elements", "salt", "start", "run", "stride", "offset"])
def _adamw_kernel(
    main_ptr,
    grad_ptr,
    first_ptr,
    first_exponents_ptr,
    second_ptr,
    second_exponents_ptr,
    weight_ptr,
    step_ptr,
    found_inf_ptr,
    num_elements,
    salt,
    start,
    run,
    stride,
    offset,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    FIRST_SMALL: tl.constexpr,
    SECOND_SMALL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_FLAG: tl.constexpr,
):
    if not is_skipped(found_inf_ptr, HAS_FLAG):
        step, lr, correction2 = load_step(step_ptr, lr, log_beta1, log_beta2)
        block = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
        at = block[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
        random = 0
        if FIRST_SMALL or SECOND_SMALL or STOCHASTIC:
            random = _random(salt, step, start, run, stride, offset, block)
        settings = (lr, beta1, beta2, rest1, rest2, correction2, eps, decay)
        # A mask keeps Triton from moving 16 bytes at a time, so only the last program has one.
        if (tl.program_id(0) + 1).to(tl.int64) * _ROWS * _WIDTH <= num_elements:
            update_block(
                main_ptr, grad_ptr, first_ptr, first_exponents_ptr, second_ptr, second_exponents_ptr,
                weight_ptr, random, settings, at, None, block, None,
                FIRST_SMALL, SECOND_SMALL, HAS_WEIGHT, STOCHASTIC, False,
            )  # fmt: skip
        else:
            update_block(
                main_ptr, grad_ptr, first_ptr, first_exponents_ptr, second_ptr, second_exponents_ptr,
                weight_ptr, random, settings, at, at < num_elements, block, block * _WIDTH < num_elements,
                FIRST_SMALL, SECOND_SMALL, HAS_WEIGHT, STOCHASTIC, True,
            )  # fmt: skip


def adamw_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    numbers: AdamWStep,
    *,
    weight: torch.Tensor | None = None,
    place: ElementPlace | None = None,
    stochastic: bool = False,
) -> None:
    """Update flat buffers of one length in place; ``weight``, if given, becomes the rounded main weights.
    ``place`` is where they lie in their parameter, for stochastic rounding; ``stochastic``: of main weights,
    to bfloat16."""
    num_elements = main.numel()
    if num_elements == 0:
        return
    assert place is not None or (isinstance(exp_avg, torch.Tensor) and isinstance(exp_avg_sq, torch.Tensor))
    where = (0, 0, 1, 0, 0) if place is None else (
        place.salt, place.start, place.run, place.stride, place.offset
    )  # fmt: skip
    _adamw_kernel[(cdiv(num_elements, _ROWS.value * block_floats.BLOCK),)](
        main,
        grad,
        *_tensors(exp_avg),
        *_tensors(exp_avg_sq),
        main if weight is None else weight,
        numbers.step,
        main if numbers.found_inf is None else numbers.found_inf,
        num_elements,
        *where,
        *factors(numbers),
        FIRST_SMALL=isinstance(exp_avg, BlockFloats),
        SECOND_SMALL=isinstance(exp_avg_sq, BlockFloats),
        HAS_WEIGHT=weight is not None,
        STOCHASTIC=stochastic,
        HAS_FLAG=numbers.found_inf is not None,
        num_warps=8,
    )


def _tensors(moment: Moment) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements, and exponents where there are any."""
    return (moment.codes, moment.exponents) if isinstance(moment, BlockFloats) else (moment, moment)


def factors(numbers: AdamWStep) -> tuple[float, ...]:
    """lr, beta1, beta2, one minus each of them, their logarithms, eps and what decay leaves."""
    lr, beta1, beta2 = numbers.lr, numbers.beta1, numbers.beta2
    return (
        float(lr), float(beta1), float(beta2), 1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2),
        float(numbers.eps), 1.0 - lr * numbers.weight_decay,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf  # a moment without memory needs no correction
