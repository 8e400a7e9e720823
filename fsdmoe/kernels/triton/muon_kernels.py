"""Muon's passes over elements around Newton–Schulz, each in one: torch would read and write them twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_BLOCK = tl.constexpr(4096)


@triton.jit
def _look_ahead(grad_ptrs, momentum_ptrs, out_ptrs, weight, inside):
    grad = tl.load(grad_ptrs, mask=inside).to(tl.float32)
    momentum = tl.load(momentum_ptrs, mask=inside).to(tl.float32)
    ahead = grad + weight * (momentum - grad)
    tl.store(out_ptrs, ahead.to(out_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _apply(main_ptrs, update_ptrs, keep, rate, inside):
    main = tl.load(main_ptrs, mask=inside).to(tl.float32)
    update = tl.load(update_ptrs, mask=inside).to(tl.float32)
    tl.store(main_ptrs, (main * keep - rate * update).to(main_ptrs.dtype.element_ty), mask=inside)


# A mask keeps Triton from moving 16 bytes at a time, so only the last block has one.
@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _look_ahead_kernel(grad_ptr, momentum_ptr, out_ptr, weight, num_elements):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    at = start + tl.arange(0, _BLOCK)
    if start + _BLOCK <= num_elements:
        _look_ahead(grad_ptr + at, momentum_ptr + at, out_ptr + at, weight, None)
    else:
        _look_ahead(grad_ptr + at, momentum_ptr + at, out_ptr + at, weight, at < num_elements)


@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _apply_kernel(main_ptr, update_ptr, keep, rate, num_elements):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    at = start + tl.arange(0, _BLOCK)
    if start + _BLOCK <= num_elements:
        _apply(main_ptr + at, update_ptr + at, keep, rate, None)
    else:
        _apply(main_ptr + at, update_ptr + at, keep, rate, at < num_elements)


def look_ahead_triton(grad: torch.Tensor, momentum: torch.Tensor, out: torch.Tensor, weight: float) -> None:
    """``out = (1 - weight) * grad + weight * momentum`` of flat tensors."""
    if out.numel():
        grid = (cdiv(out.numel(), _BLOCK.value),)
        _look_ahead_kernel[grid](grad, momentum, out, float(weight), out.numel(), num_warps=8)


def apply_update_triton(main: torch.Tensor, update: torch.Tensor, keep: float, rate: float) -> None:
    """``main = keep * main - rate * update`` of flat tensors."""
    if main.numel():
        grid = (cdiv(main.numel(), _BLOCK.value),)
        _apply_kernel[grid](main, update, float(keep), float(rate), main.numel(), num_warps=8)
