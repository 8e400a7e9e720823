"""AdamW over flat buffers in one pass: main weights, both moments and the bf16 weights, each touched once.

    g = scale · grad;  m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²
    w = w (1 − lr · decay) − lr · m / (1 − β1^t) / (sqrt(v / (1 − β2^t)) + ε);  weight = bf16(w)

Arithmetic is fp32 whatever main weights, gradients and moments are stored in. Step count, gradient scale and
the "found an infinity" flag live on the device, so a step neither waits for it nor is decided on the host:
with the flag set nothing changes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_BLOCK = 2048


@triton.jit
def _one_minus_exp(x):
    """1 − exp(x) for x ≤ 0 without cancellation near zero, where the first steps' corrections are."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, series, 1 - tl.exp(x))


@triton.jit
def _update(
    main_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    weight_ptr,
    scale,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    correction2,
    eps,
    decay,
    at,
    inside,
    HAS_WEIGHT: tl.constexpr,
):
    """One block, and its new main weights; ``lr`` is already divided by the first moment's correction."""
    grad = tl.load(grad_ptr + at, mask=inside).to(tl.float32) * scale
    main = tl.load(main_ptr + at, mask=inside).to(tl.float32)
    exp_avg = beta1 * tl.load(exp_avg_ptr + at, mask=inside).to(tl.float32) + rest1 * grad
    exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr + at, mask=inside).to(tl.float32) + rest2 * grad * grad
    main = main * decay - lr * exp_avg / (tl.sqrt(exp_avg_sq / correction2) + eps)
    tl.store(main_ptr + at, main.to(main_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_ptr + at, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(weight_ptr + at, main.to(weight_ptr.dtype.element_ty), mask=inside)
    return main


@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _adamw_kernel(
    main_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    weight_ptr,
    step_ptr,
    scale_ptr,
    found_inf_ptr,
    num_elements,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skipped = False
    if HAS_FLAG:
        skipped = tl.load(found_inf_ptr) > 0
    if not skipped:
        step = tl.load(step_ptr)
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr)
        correction2 = _one_minus_exp(step * log_beta2)
        lr = lr / _one_minus_exp(step * log_beta1)
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        # A mask keeps Triton from moving 16 bytes at a time, so only the last block has one.
        if start + BLOCK <= num_elements:
            _update(
                main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, scale, lr, beta1, beta2, rest1,
                rest2, correction2, eps, decay, at, None, HAS_WEIGHT,
            )  # fmt: skip
        else:
            _update(
                main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, weight_ptr, scale, lr, beta1, beta2, rest1,
                rest2, correction2, eps, decay, at, at < num_elements, HAS_WEIGHT,
            )  # fmt: skip


def adamw_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamWStep,
    *,
    weight: torch.Tensor | None = None,
) -> None:
    """Update flat buffers of one length in place; ``weight``, if given, becomes the rounded main weights."""
    num_elements = main.numel()
    if num_elements == 0:
        return
    _adamw_kernel[(cdiv(num_elements, _BLOCK),)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        main if weight is None else weight,
        numbers.step,
        main if numbers.grad_scale is None else numbers.grad_scale,
        main if numbers.found_inf is None else numbers.found_inf,
        num_elements,
        float(numbers.lr),
        float(numbers.beta1),
        float(numbers.beta2),
        1.0 - numbers.beta1,
        1.0 - numbers.beta2,
        _log(numbers.beta1),
        _log(numbers.beta2),
        float(numbers.eps),
        1.0 - numbers.lr * numbers.weight_decay,
        HAS_WEIGHT=weight is not None,
        HAS_SCALE=numbers.grad_scale is not None,
        HAS_FLAG=numbers.found_inf is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf  # a moment without memory needs no correction


def adamw_reference_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamWStep,
    *,
    weight: torch.Tensor | None = None,
) -> None:
    """The same in plain torch, in the precision of ``main``; looks at the flag from the host."""
    if numbers.found_inf is not None and numbers.found_inf > 0:
        return
    grad = grad.to(main.dtype) * (1 if numbers.grad_scale is None else numbers.grad_scale)
    first = exp_avg.to(main.dtype).lerp(grad, 1 - numbers.beta1)
    second = exp_avg_sq.to(main.dtype) * numbers.beta2 + (1 - numbers.beta2) * grad * grad
    step = numbers.step.double()
    correction1, correction2 = 1 - numbers.beta1**step, 1 - numbers.beta2**step
    main.mul_(1 - numbers.lr * numbers.weight_decay)
    main.sub_(numbers.lr * first / correction1 / ((second / correction2).sqrt() + numbers.eps))
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if weight is not None:
        weight.copy_(main)
