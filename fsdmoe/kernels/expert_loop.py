"""One expert after the other: the loop that the definition of the experts' compute and its emulation share.

It waits for the device. Sizes: R rows, K assignments a row, E experts here, D hidden, N expert width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdmoe.kernels.activations import activate
from fsdmoe.kernels.expert_operands import ExpertPolicy, Rows

First = Callable[[int, Tensor], Tensor]
"""``first(expert, x)``: the gates and ups of an expert's rows, bias included."""
Second = Callable[[int, Tensor, Tensor | None], Tensor]
"""``second(expert, h, weight)``: its output in the precision that is summed in, with its bias times
``weight`` where one is given."""


def loop_over_experts(
    rows: Rows, num_experts: int, policy: ExpertPolicy, first: First, second: Second
) -> Tensor:
    """``y_RD``; see :mod:`fsdmoe.kernels.expert_mlp`."""
    x_RD, weights_RK, ids_RK = rows
    y_RD = torch.zeros_like(x_RD, dtype=summed_in(x_RD))
    for expert in range(num_experts):
        row, k = (ids_RK == expert).nonzero(as_tuple=True)
        weight = weights_RK[row, k].unsqueeze(-1)
        h = activate(first(expert, x_RD[row]).to(y_RD.dtype), policy.activation, policy.limit)
        if policy.weight_after:
            y = second(expert, h.to(x_RD.dtype), None) * weight
        else:
            y = second(expert, (h * weight).to(x_RD.dtype), weight)
        y_RD = y_RD.index_add(0, row, y)
    return y_RD.to(x_RD.dtype)


def summed_in(x_RD: Tensor) -> torch.dtype:
    """The precision that outputs of several experts are summed in."""
    return torch.promote_types(x_RD.dtype, torch.float32)


def add_bias(y: Tensor, bias_EO: Tensor | None, expert: int, weight: Tensor | None = None) -> Tensor:
    if bias_EO is None:
        return y
    return y + (bias_EO[expert] if weight is None else weight * bias_EO[expert])
