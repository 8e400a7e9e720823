"""Muon's passes over elements around Newton–Schulz, each in one: torch would read and write them twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_BLOCK = tl.constexpr(4096)


@triton.jit
def _look_ahead(momentum_ptrs, grad_ptrs, out_ptrs, weight, inside):
    grad = tl.load(grad_ptrs, mask=inside).to(tl.float32)
    momentum = tl.load(momentum_ptrs, mask=inside).to(tl.float32)
    kept = (momentum + (1 - weight) * (grad - momentum)).to(momentum_ptrs.dtype.element_ty)
    tl.store(momentum_ptrs, kept, mask=inside)
    ahead = grad + weight * (kept.to(tl.float32) - grad)
    tl.store(out_ptrs, ahead.to(out_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _apply(main_ptrs, update_ptrs, cast_ptrs, keep, rate, inside, CASTS: tl.constexpr):
    main = tl.load(main_ptrs, mask=inside).to(tl.float32)
    update = tl.load(update_ptrs, mask=inside).to(tl.float32)
    stepped = (main * keep - rate * update).to(main_ptrs.dtype.element_ty)
    tl.store(main_ptrs, stepped, mask=inside)
    if CASTS:
        tl.store(cast_ptrs, stepped.to(cast_ptrs.dtype.element_ty), mask=inside)


# A mask keeps Triton from moving 16 bytes at a time, so only the last block has one.
@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _look_ahead_kernel(momentum_ptr, grad_ptr, out_ptr, weight, num_elements):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    at = start + tl.arange(0, _BLOCK)
    if start + _BLOCK <= num_elements:
        _look_ahead(momentum_ptr + at, grad_ptr + at, out_ptr + at, weight, None)
    else:
        _look_ahead(momentum_ptr + at, grad_ptr + at, out_ptr + at, weight, at < num_elements)


@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _apply_kernel(main_ptr, update_ptr, cast_ptr, keep, rate, num_elements, CASTS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    at = start + tl.arange(0, _BLOCK)
    if start + _BLOCK <= num_elements:
        _apply(main_ptr + at, update_ptr + at, cast_ptr + at, keep, rate, None, CASTS)
    else:
        _apply(main_ptr + at, update_ptr + at, cast_ptr + at, keep, rate, at < num_elements, CASTS)


def look_ahead_triton(momentum: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, weight: float) -> None:
    """``momentum = weight * momentum + (1 - weight) * grad``, then ``out = weight * momentum + (1 - weight) *
    grad``, of flat tensors."""
    if out.numel():
        grid = (cdiv(out.numel(), _BLOCK.value),)
        _look_ahead_kernel[grid](momentum, grad, out, float(weight), out.numel(), num_warps=8)


def apply_update_triton(
    main: torch.Tensor, update: torch.Tensor, cast: torch.Tensor | None, keep: float, rate: float
) -> None:
    """``main = keep * main - rate * update`` of flat tensors, and ``cast = main`` where there is one."""
    if main.numel():
        grid = (cdiv(main.numel(), _BLOCK.value),)
        _apply_kernel[grid](
            main, update, main if cast is None else cast, float(keep), float(rate), main.numel(),
            CASTS=cast is not None, num_warps=8,
        )  # fmt: skip
