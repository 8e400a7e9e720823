"""The experts' compute on grouped matrix products of plain torch, as one autograd function.

It keeps its input and the pre-activation for backward, ``2·R·D + 4·M·N`` bytes in bf16 for M assignments, and
beside them only what is small: routing weights and indices. The experts' output is not needed: a routing
weight's gradient is ``(dy W2) · h`` (plus ``dy · b2``), whether the weight multiplies before W2 or after it.

Sizes: R rows, K assignments a row, M slots (see ``permute``), E experts here, D hidden, N expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdmoe.kernels.activations import activate, activate_backward, activation_of
from fsdmoe.kernels.expert_operands import DEFAULT_POLICY, ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.grad_sink import GradSink, deliver, sink_of
from fsdmoe.kernels.grouped import grouped_matmul
from fsdmoe.kernels.permute import (
    RowPermutation,
    group_assignments,
    put_assignments,
    sum_rows,
    take_assignments,
    take_rows,
)


def experts_mlp_grouped(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy = DEFAULT_POLICY, max_rows: int | None = None
) -> Tensor:
    """``experts_mlp`` in plain torch."""
    activation_of(policy.activation)
    num_experts = weights.gate_up_E2ND.shape[0]
    permutation = group_assignments(rows.ids_RK, num_experts, max_assignments=max_rows)
    sinks = tuple(None if parameter is None else sink_of(parameter) for parameter in weights)
    how = _Call(policy.activation, policy.weight_after, sinks)
    return _Experts.apply(rows.x_RD, rows.weights_RK, *weights, *permutation, how)


@dataclass(frozen=True)
class _Call:
    """What the autograd function needs beside tensors."""

    activation: str
    weight_after: bool
    sinks: tuple[GradSink | None, ...]
    """Of gate_up, down, gate_up_bias, down_bias: where each gradient goes, if not to autograd."""


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, weights_RK, gate_up, down, gate_up_bias, down_bias, *indices_and_policy):
        *indices, policy = indices_and_policy
        permutation = RowPermutation(*indices)
        ends_E = permutation.ends_G
        z_M2N = grouped_matmul(take_rows(x_RD, permutation), gate_up.transpose(1, 2), ends_E)
        if gate_up_bias is not None:
            z_M2N += gate_up_bias.index_select(0, permutation.groups_M())
        weights_M1 = take_assignments(weights_RK, permutation).unsqueeze(-1)
        h_MN = activate(_wide(z_M2N), policy.activation)
        if not policy.weight_after:
            h_MN *= weights_M1
        y_MD = grouped_matmul(h_MN.to(x_RD.dtype), down.transpose(1, 2), ends_E)
        del h_MN
        if down_bias is not None:
            bias_MD = down_bias.index_select(0, permutation.groups_M())
            y_MD += bias_MD if policy.weight_after else bias_MD * weights_M1
        ctx.save_for_backward(x_RD, z_M2N, weights_RK, gate_up, down, down_bias, *indices)
        ctx.policy = policy
        return sum_rows(y_MD, permutation, weights_RK if policy.weight_after else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_RD):
        x_RD, z_M2N, weights_RK, gate_up, down, down_bias, *indices = ctx.saved_tensors
        policy: _Call = ctx.policy
        needs_x, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, *_ = (
            ctx.needs_input_grad
        )
        permutation = RowPermutation(*indices)
        ends_E = permutation.ends_G
        weights_M1 = take_assignments(weights_RK, permutation).unsqueeze(-1)
        dy_MD = take_rows(dy_RD, permutation)

        dh_MN = _wide(grouped_matmul(dy_MD, down, ends_E))  # before weighting, under either policy
        z_wide = _wide(z_M2N)
        h_MN = activate(z_wide, policy.activation)
        dweights_RK = dx_RD = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        if needs_weights:
            dweights_M = (dh_MN * h_MN).sum(-1)
            if down_bias is not None:
                dweights_M += (_wide(dy_MD) * down_bias.index_select(0, permutation.groups_M())).sum(-1)
            dweights_RK = put_assignments(dweights_M, permutation).to(weights_RK.dtype)
        dz_M2N = activate_backward(z_wide, dh_MN.mul_(weights_M1), policy.activation).to(x_RD.dtype)
        del dh_MN, z_wide

        if needs_down_bias:
            ddown_bias = _expert_sums(dy_MD, weights_M1, ends_E)
        if needs_down:
            if policy.weight_after:
                dy_MD = (dy_MD * weights_M1).to(dy_MD.dtype)
            else:
                h_MN *= weights_M1
            ddown = grouped_matmul(dy_MD.t(), h_MN.to(dy_MD.dtype), ends_E)
        del h_MN, dy_MD
        if needs_gate_up_bias:
            dgate_up_bias = _expert_sums(dz_M2N, torch.ones_like(weights_M1), ends_E)
        if needs_gate_up:
            dgate_up = grouped_matmul(dz_M2N.t(), take_rows(x_RD, permutation), ends_E)
        if needs_x:
            dx_RD = sum_rows(grouped_matmul(dz_M2N, gate_up, ends_E), permutation)
        gradients = (dgate_up, ddown, dgate_up_bias, ddown_bias)
        delivered = [
            None if gradient is None else deliver(gradient, sink, gate_up.dtype)
            for sink, gradient in zip(policy.sinks, gradients, strict=True)
        ]
        return dx_RD, dweights_RK, *delivered, None, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    """At least fp32: activations and sums are never done in bf16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _expert_sums(rows_MD: Tensor, weights_M1: Tensor, ends_E: Tensor) -> Tensor:
    """For each expert the weighted sum of its rows, ``[E, D]``; a grouped product, so without atomics."""
    columns = rows_MD.new_zeros(rows_MD.shape[0], 16 // rows_MD.element_size())
    columns[:, :1] = weights_M1
    return grouped_matmul(columns.t(), rows_MD, ends_E)[:, 0]
