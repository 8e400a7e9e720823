"""Frozen weights that are kept as codes: their values, where they are used.

Values are made for one layer and dropped after it; autograd keeps the codes, which are there anyway, and
backward makes the values again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.expert_autograd import ExpertProducts, Given, Grads
from fsdmoe.precision.quantized_weight import WeightScales, decoded, scales_of


def frozen_values(weight: Tensor, scales: WeightScales | None, dtype: torch.dtype) -> Tensor:
    """What codes stand for, in memory of their own; without scales the weight itself."""
    if scales is not None and scales.four_bit is not None and (fused := triton_for(weight)) is not None:
        return fused.decode_four_bit(weight, scales, dtype)
    return decoded(weight, scales, dtype)


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
        return F.linear(x, frozen_values(weight_MN, scales, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None]:
        (weight_MN,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return grad_y @ frozen_values(weight_MN, ctx.scales, grad_y.dtype), None, None


class DecodedProducts(NamedTuple):
    """Any products of experts (:class:`~fsdmoe.kernels.expert_autograd.ExpertProducts`) over weights that are
    kept as codes: both are decoded once in forward and once in backward."""

    products: ExpertProducts
    gate_up_scales: WeightScales | None
    """None for a weight that is not coded."""
    down_scales: WeightScales | None

    def gate_up(self, given: Given, ids_RK: Tensor, *, keep: bool) -> tuple[list[Any], Any]:
        gate_up = frozen_values(given.gate_up_E2ND, self.gate_up_scales, given.x_RD.dtype)
        down = given.down_EDN
        if self.down_scales is not None:  # its shape alone is looked at
            down = torch.empty(self.down_scales.shape_of(down), dtype=given.x_RD.dtype, device="meta")
        return self.products.gate_up(given._replace(gate_up_E2ND=gate_up, down_EDN=down), ids_RK, keep=keep)

    def down(self, given: Given, activated: list[Any]) -> Tensor:
        down = frozen_values(given.down_EDN, self.down_scales, given.x_RD.dtype)
        return self.products.down(given._replace(down_EDN=down), activated)

    def down_dgrad(
        self, dy_RD: Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[Any, tuple[Any, Given]]:
        values = self._decoded(given)
        operands, rest = self.products.down_dgrad(dy_RD, values, kept, grads)
        return operands, (rest, values)

    def wgrad(self, operands: Any, grads: Grads) -> None:
        self.products.wgrad(operands, grads)

    def gate_up_dgrad(self, operands: tuple[Any, Given], given: Given, grads: Grads) -> None:
        rest, values = operands
        self.products.gate_up_dgrad(rest, values, grads)

    def _decoded(self, given: Given) -> Given:
        dtype = given.x_RD.dtype
        return given._replace(
            gate_up_E2ND=frozen_values(given.gate_up_E2ND, self.gate_up_scales, dtype),
            down_EDN=frozen_values(given.down_EDN, self.down_scales, dtype),
        )
