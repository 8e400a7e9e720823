"""The experts' compute by the grouped product of another library (:mod:`fsdmoe.kernels.libraries`).

Rows are laid out by expert in plain torch, each expert's filled up to what the library wants, without a
reading of the device; activations and routing weights are left to autograd.

Sizes: R rows, K assignments a row, M slots, E experts here, D hidden, N expert width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.activations import activate
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.permute import group_assignments


def experts_mlp_by_library(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None, updates: LowRankUpdates
) -> Tensor:
    """``experts_mlp`` with the grouped products of ``policy.products``, differentiated by autograd."""
    products = policy.products
    assert products is not None
    assert products.grouped is not None
    refused = {"low-rank updates": updates, "biases": (weights.gate_up_bias, weights.down_bias)}
    for what, tensors in refused.items():
        if any(tensor is not None for tensor in tensors):
            raise ConfigError(
                f"precision.backend: expected experts without {what} for {products.library}, got some; leave "
                'experts out of precision.covers, or set precision.backend = "own"'
            )
    slots = _aligned_slots(rows.ids_RK, len(weights.down_EDN), products.align, max_rows)
    flat = rows.weights_RK.reshape(-1)
    weights_M1 = torch.cat((flat, flat.new_zeros(1)))[slots.source_M].unsqueeze(-1)
    x_MD = _Move.apply(rows.x_RD, slots.row_M, slots.slot_RK)
    z_M2N = products.grouped(x_MD, weights.gate_up_E2ND, slots.ends_E)
    h_MN = activate(z_M2N.float(), policy.activation, policy.limit)
    if not policy.weight_after:
        h_MN = h_MN * weights_M1
    y_MD = products.grouped(h_MN.to(rows.x_RD.dtype), weights.down_EDN, slots.ends_E)
    if policy.weight_after:
        y_MD = (y_MD * weights_M1).to(y_MD.dtype)
    return _Move.apply(y_MD, slots.slot_RK, slots.row_M)


class _Slots(NamedTuple):
    """Rows laid out by expert, each expert's filled up with rows of zeros; M slots, R rows, K choices."""

    row_M: Tensor
    """The row in each slot; R: zeros."""
    source_M: Tensor
    """The choice in each slot; R * K: none."""
    slot_RK: Tensor
    """The slot of each choice; M: none."""
    ends_E: Tensor


def _aligned_slots(ids_RK: Tensor, num_experts: int, align: int, max_rows: int | None) -> _Slots:
    num_rows, num_choices = ids_RK.shape
    found = group_assignments(ids_RK, num_experts, max_assignments=max_rows)
    num_slots = (-(-found.num_slots // align) + num_experts) * align
    starts_E = torch.cat((found.ends_G.new_zeros(1), found.ends_G[:-1]))
    padded_E = (found.ends_G - starts_E + align - 1) // align * align
    ends_E = padded_E.cumsum(0, dtype=torch.int32)
    shift_E = ends_E - padded_E - starts_E
    slot_RK = (found.slots_RK + shift_E[ids_RK.clamp(min=0).long()]).long()
    slot_RK = slot_RK.masked_fill(found.slots_RK < 0, num_slots)
    none = num_rows * num_choices
    choices = torch.arange(none, device=ids_RK.device)
    source_M = choices.new_full((num_slots + 1,), none).scatter_(0, slot_RK.flatten(), choices)[:-1]
    row_M = torch.where(source_M == none, num_rows, source_M // max(num_choices, 1))
    return _Slots(row_M, source_M, slot_RK, ends_E)


class _Move(torch.autograd.Function):
    """The row of each slot, or the sum of each row's slots: one is the other's backward. Without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _moved(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _moved(grad, back), None, None


def _moved(x: Tensor, index: Tensor) -> Tensor:
    with_zeros = torch.cat((x, x.new_zeros(1, x.shape[1])))
    found = with_zeros[index]
    return found if index.ndim == 1 else found.sum(1)
