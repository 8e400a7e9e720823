"""Multiply a tensor by a scalar on the device, touching it only if the scalar is not one.

A loss is nearly always what backward starts from, so the gradient that arrives at it is one; the host cannot
look without waiting for the device, the kernel can.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fsdmoe.kernels.triton.launch import QuickLaunch, cdiv

_BLOCK = tl.constexpr(4096)
_PROGRAMS = 2048  # walk the whole tensor: launching a program for each block would take longer than the look


@triton.jit
def _scale_block(ptrs, scale, inside):
    value = tl.load(ptrs, mask=inside)
    tl.store(ptrs, (value.to(tl.float32) * scale).to(value.dtype), mask=inside)


@QuickLaunch
@triton.jit(do_not_specialize=["num_elements"])
def _scale_kernel(tensor_ptr, scale_ptr, num_elements):
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale != 1.0:
        step = tl.num_programs(0).to(tl.int64) * _BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * _BLOCK, num_elements, step):
            at = start + tl.arange(0, _BLOCK)
            # A mask keeps Triton from moving 16 bytes at a time, so only the last block has one.
            if start + _BLOCK <= num_elements:
                _scale_block(tensor_ptr + at, scale, None)
            else:
                _scale_block(tensor_ptr + at, scale, at < num_elements)


def scale_(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``tensor *= scale`` for a contiguous tensor and a scalar on its device, computed in fp32."""
    num_elements = tensor.numel()
    if num_elements > 0:
        programs = min(_PROGRAMS, cdiv(num_elements, _BLOCK.value))
        _scale_kernel[(programs,)](tensor, scale, num_elements, num_warps=8)
    return tensor
