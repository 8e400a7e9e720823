"""All experts at once, each in a stretch of rows as long as the longest: how their compute is emulated.

A few operations instead of as many for each expert, which is what an emulation spends its time on. It waits
for the device once, to learn the longest. Sizes: R rows, K assignments a row, A assignments of experts here,
E experts here, C rows of the longest stretch, D hidden, N expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.kernels.activations import activate
from fsdmoe.kernels.expert_loop import summed_in
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows

SHORT, LONG = 16, 128
"""What the length of stretches is a multiple of, below and above ``LONG``: so blocks of tokens in any format
are whole, which is cheaper."""
MOST_PADDING = 4
"""Times the rows there are. Beyond it one expert after the other is cheaper, and fits in memory."""

Product = Callable[[Tensor], Tensor]
"""``[E, C, in]`` to ``[E, C, out]``, without a bias."""


class Stretches(NamedTuple):
    """Where each assignment stands when every expert has a stretch of the same length."""

    row_A: Tensor
    k_A: Tensor
    place_A: Tensor
    """In all stretches, one after the other."""
    length: int

    def spread(self, values_A: Tensor, num_experts: int) -> Tensor:
        """``[E, C, ...]``, zero where nothing stands."""
        empty = values_A.new_zeros(num_experts * self.length, *values_A.shape[1:])
        return empty.index_copy(0, self.place_A, values_A).unflatten(0, (num_experts, self.length))


def stretches_of(ids_RK: Tensor, num_experts: int) -> Stretches | None:
    """None where padding would be too much. Rows keep their order, so blocks of tokens are those of an expert
    by itself."""
    row_A, k_A = (ids_RK >= 0).nonzero(as_tuple=True)
    ids_A, order_A = ids_RK[row_A, k_A].long().sort(stable=True)
    counts_E = torch.bincount(ids_A, minlength=num_experts)
    longest = int(counts_E.max()) if len(ids_A) else 0
    multiple = SHORT if longest <= LONG else LONG
    length = max(1, -(-longest // multiple)) * multiple
    if num_experts * length > MOST_PADDING * len(ids_A) + num_experts * SHORT:
        return None
    first_E = counts_E.cumsum(0) - counts_E
    place_A = ids_A * length + torch.arange(len(ids_A), device=ids_A.device) - first_E[ids_A]
    return Stretches(row_A[order_A], k_A[order_A], place_A, length)


def all_experts_at_once(
    rows: Rows, at: Stretches, weights: ExpertWeights, policy: ExpertPolicy, products: tuple[Product, Product]
) -> Tensor:
    """``y_RD``; what :func:`fsdmoe.kernels.expert_loop.loop_over_experts` computes."""
    x_RD, weights_RK, _ = rows
    first, second = products
    num_experts, dtype = len(weights.gate_up_E2ND), summed_in(x_RD)
    weight_EC = at.spread(weights_RK[at.row_A, at.k_A], num_experts).unsqueeze(-1)
    z_EC2N = _plus(first(at.spread(x_RD[at.row_A], num_experts)), weights.gate_up_bias)
    h_ECN = activate(z_EC2N.to(dtype), policy.activation)
    if not policy.weight_after:
        h_ECN = h_ECN * weight_EC
    elif weights.gate_up_bias is not None:  # padding has no weight to become zero by
        is_row = at.spread(torch.ones_like(at.row_A, dtype=torch.bool), num_experts)
        h_ECN = h_ECN.masked_fill(~is_row.unsqueeze(-1), 0.0)
    y_ECD = second(h_ECN.to(x_RD.dtype)).to(dtype)
    if policy.weight_after:
        y_ECD = _plus(y_ECD, weights.down_bias) * weight_EC
    else:
        y_ECD = _plus(y_ECD, weights.down_bias, weight_EC)
    y_AD = y_ECD.flatten(0, 1)[at.place_A]
    return torch.zeros_like(x_RD, dtype=dtype).index_add(0, at.row_A, y_AD).to(x_RD.dtype)


def _plus(y_ECO: Tensor, bias_EO: Tensor | None, weight_EC: Tensor | None = None) -> Tensor:
    if bias_EO is None:
        return y_ECO
    bias = bias_EO.unsqueeze(1)
    return y_ECO + (bias if weight_EC is None else weight_EC * bias)
