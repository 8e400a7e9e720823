"""Frozen weights that are kept as fp8 codes with block scales: their values, where they are used.

Values are made for one product and dropped after it; autograd keeps the codes, which are there anyway, and
backward makes the values again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdmoe.precision.quantized_weight import WeightScales, decoded, scales_of


@torch.compiler.disable(reason="scales that a compiled graph would not see")
def frozen_linear(x: Tensor, weight_MN: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """``F.linear`` with a weight that is kept as codes."""
    if weight_MN.requires_grad and torch.is_grad_enabled():
        raise AssertionError(
            "expected a frozen weight, got codes of one that is trained: it gets no gradient here"
        )
    y = _FrozenLinear.apply(x, weight_MN, scales_of(weight_MN))
    return y if bias_M is None else y + bias_M


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MN: Tensor, scales: WeightScales) -> Tensor:
        ctx.save_for_backward(weight_MN)
        ctx.scales = scales
        return F.linear(x, decoded(weight_MN, scales, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None]:
        (weight_MN,) = ctx.saved_tensors
        grad_x = grad_y @ decoded(weight_MN, ctx.scales, grad_y.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, None
