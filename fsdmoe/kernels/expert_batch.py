"""All experts at once, each in a range of rows as long as the longest: how their compute is emulated.

A few operations instead of as many for each expert, which is what an emulation spends its time on. It waits
for the device once, to learn the longest. Sizes: R rows, K assignments a row, A assignments of experts here,
E experts here, C rows of the longest range, D hidden, N expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.kernels.activations import activate
from fsdmoe.kernels.expert_loop import summed_in
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.permute import group_assignments

SHORT, LONG = 16, 128
"""What the length of ranges is a multiple of, below and above ``LONG``: so blocks of tokens in any format
are whole, which is cheaper."""
MOST_PADDING = 4
"""Times the rows there are. Beyond it one expert after the other is cheaper, and fits in memory."""

Product = Callable[[Tensor], Tensor]
"""``[E, C, in]`` to ``[E, C, out]``, without a bias."""


class ExpertRanges(NamedTuple):
    """Where each assignment stands when every expert has a range of the same length."""

    row_A: Tensor
    k_A: Tensor
    place_A: Tensor
    """In all ranges, one after the other."""
    shape: tuple[int, int]
    """Experts, and rows of a range."""

    def spread(self, values_A: Tensor) -> Tensor:
        """``[E, C, ...]``, zero where nothing stands."""
        num_experts, length = self.shape
        empty = values_A.new_zeros(num_experts * length, *values_A.shape[1:])
        return empty.index_copy(0, self.place_A, values_A).unflatten(0, self.shape)


def ranges_of(ids_RK: Tensor, num_experts: int) -> ExpertRanges | None:
    """None where padding would be too much. Rows keep their order, so blocks of tokens are those of an expert
    by itself."""
    permutation = group_assignments(ids_RK, num_experts)
    ends = [0, *permutation.ends_G.tolist()]
    longest = max(end - start for start, end in pairwise(ends))
    multiple = SHORT if longest <= LONG else LONG
    length = max(1, -(-longest // multiple)) * multiple
    if num_experts * length > MOST_PADDING * ends[-1] + num_experts * SHORT:
        return None
    sources_A = permutation.sources_M[: ends[-1]].long()
    experts_A = permutation.groups_M()[: ends[-1]].long()
    first_E = torch.tensor(ends[:-1], device=ids_RK.device)
    place_A = experts_A * length + torch.arange(ends[-1], device=ids_RK.device) - first_E[experts_A]
    top_k = ids_RK.shape[1]
    return ExpertRanges(sources_A // top_k, sources_A % top_k, place_A, (num_experts, length))


def all_experts_at_once(
    rows: Rows,
    at: ExpertRanges,
    weights: ExpertWeights,
    policy: ExpertPolicy,
    products: tuple[Product, Product],
) -> Tensor:
    """``y_RD``; what :func:`fsdmoe.kernels.expert_loop.loop_over_experts` computes."""
    x_RD, weights_RK, _ = rows
    first, second = products
    dtype = summed_in(x_RD)
    weight_EC = at.spread(weights_RK[at.row_A, at.k_A]).unsqueeze(-1)
    z_EC2N = _plus(first(at.spread(x_RD[at.row_A])), weights.gate_up_bias)
    h_ECN = activate(z_EC2N.to(dtype), policy.activation, policy.limit)
    if not policy.weight_after:
        h_ECN = h_ECN * weight_EC
    elif weights.gate_up_bias is not None:  # padding has no weight to become zero by
        is_row = at.spread(torch.ones_like(at.row_A, dtype=torch.bool))
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
