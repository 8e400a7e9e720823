"""The experts' compute on grouped matrix products of plain torch, as one autograd function.

It keeps its input and the pre-activation for backward, ``2·R·D + 4·M·N`` bytes in bf16 for M assignments (the
input alone under ``ExpertPolicy.recompute``), and beside them only what is small: routing weights and
indices. The experts' output is not needed: a routing weight's gradient is ``(dy W2) · h`` (plus ``dy · b2``),
whether the weight multiplies before W2 or after it. A low-rank update is two narrow products beside the wide
one; its own gradients need no others, so those of weights that are frozen are not computed.

Sizes: R rows, K assignments a row, M slots (see ``permute``), E experts here, D hidden, N expert width, Q the
rank of an update; I and O stand for the width that goes into a weight and the one that comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdmoe.kernels.activations import activate, activate_backward
from fsdmoe.kernels.expert_operands import (
    DEFAULT_POLICY,
    NO_UPDATES,
    ExpertPolicy,
    ExpertWeights,
    LowRankUpdates,
    Rows,
)
from fsdmoe.kernels.grad_sink import GradSink, deliver, sink_of
from fsdmoe.kernels.grouped import grouped_matmul
from fsdmoe.kernels.late_grads import LateGrads
from fsdmoe.kernels.permute import (
    RowPermutation,
    group_assignments,
    put_assignments,
    sum_rows,
    take_assignments,
    take_rows,
)
from fsdmoe.precision.quantized_weight import WeightScales, decoded, scales_of


def experts_mlp_grouped(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy = DEFAULT_POLICY,
    max_rows: int | None = None,
    updates: LowRankUpdates = NO_UPDATES,
) -> Tensor:
    """``experts_mlp`` in plain torch."""
    num_experts = weights.gate_up_E2ND.shape[0]
    permutation = group_assignments(rows.ids_RK, num_experts, max_assignments=max_rows)
    sinks = tuple(None if parameter is None else sink_of(parameter) for parameter in weights)
    scales = (scales_of(weights.gate_up_E2ND), scales_of(weights.down_EDN)) if policy.coded else (None, None)
    late = policy.late if all(factor is None for factor in updates) else None
    how = _Call(policy.activation, policy.weight_after, policy.recompute, sinks, scales, late)
    return _Experts.apply(rows.x_RD, rows.weights_RK, *weights, *updates, *permutation, how)


@dataclass(frozen=True)
class _Call:
    """What the autograd function needs beside tensors."""

    activation: str
    weight_after: bool
    recompute: bool
    sinks: tuple[GradSink | None, ...]
    """Of gate_up, down, gate_up_bias, down_bias: where each gradient goes, if not to autograd."""
    scales: tuple[WeightScales | None, WeightScales | None] = (None, None)
    """Of gate_up and down, where they are frozen and kept as codes: values are made for each product."""
    late: LateGrads | None = None


_PARTS = slice(0, 2), slice(2, 4), slice(4, None)
"""Of what is kept beside the weights: the factors of both updates, the permutation."""


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, weights_RK, gate_up, down, gate_up_bias, down_bias, *others):
        *factors, slots_RK, sources_M, ends_E, policy = others
        indices = slots_RK, sources_M, ends_E
        first, second = factors[:2], factors[2:]
        permutation = RowPermutation(*indices)
        scales_up, scales_down = policy.scales
        up_values = _values(gate_up, scales_up, x_RD.dtype)
        z_M2N = _pre_activation(x_RD, up_values, gate_up_bias, first, permutation)
        del up_values
        weights_M1 = take_assignments(weights_RK, permutation).unsqueeze(-1)
        h_MN = activate(_wide(z_M2N), policy.activation)
        if not policy.weight_after:
            h_MN *= weights_M1
        y_MD = _project(h_MN.to(x_RD.dtype), _values(down, scales_down, x_RD.dtype), second, ends_E)
        del h_MN
        if down_bias is not None:
            bias_MD = down_bias.index_select(0, permutation.groups_M())
            y_MD += bias_MD if policy.weight_after else bias_MD * weights_M1
        kept_M2N = None if policy.recompute else z_M2N
        biases = gate_up_bias, down_bias
        ctx.save_for_backward(x_RD, kept_M2N, weights_RK, gate_up, down, *biases, *factors, *indices)
        ctx.policy = policy
        return sum_rows(y_MD, permutation, weights_RK if policy.weight_after else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_RD):
        x_RD, z_M2N, weights_RK, gate_up, down, gate_up_bias, down_bias, *others = ctx.saved_tensors
        first, second, indices = (others[part] for part in _PARTS)
        policy: _Call = ctx.policy
        needs_x, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, *others = (
            ctx.needs_input_grad
        )
        needs_first, needs_second = any(others[:2]), any(others[2:4])
        permutation = RowPermutation(*indices)
        ends_E = permutation.ends_G
        weights_M1 = take_assignments(weights_RK, permutation).unsqueeze(-1)
        dy_MD = take_rows(dy_RD, permutation)

        scales_up, scales_down = policy.scales
        down_values = _values(down, scales_down, x_RD.dtype)
        dh_MN = _wide(_project_back(dy_MD, down_values, second, ends_E))  # unweighted, under either policy
        del down_values
        gate_up = _values(gate_up, scales_up, x_RD.dtype)
        if z_M2N is None:
            z_M2N = _pre_activation(x_RD, gate_up, gate_up_bias, first, permutation)
        z_wide = _wide(z_M2N)
        del z_M2N
        h_MN = activate(z_wide, policy.activation)
        dweights_RK = dx_RD = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        dfirst: _Factors = (None, None)
        dsecond: _Factors = (None, None)
        if needs_weights:
            dweights_M = (dh_MN * h_MN).sum(-1)
            if down_bias is not None:
                dweights_M += (_wide(dy_MD) * down_bias.index_select(0, permutation.groups_M())).sum(-1)
            dweights_RK = put_assignments(dweights_M, permutation).to(weights_RK.dtype)
        dz_M2N = activate_backward(z_wide, dh_MN.mul_(weights_M1), policy.activation).to(x_RD.dtype)
        del dh_MN, z_wide

        if needs_down_bias:
            ddown_bias = _expert_sums(dy_MD, weights_M1, ends_E)
        if needs_down or needs_second:
            if policy.weight_after:
                dy_MD = (dy_MD * weights_M1).to(dy_MD.dtype)
            else:
                h_MN *= weights_M1
            h_MN = h_MN.to(dy_MD.dtype)
        if policy.late is not None:
            given = (dz_M2N, x_RD), (dy_MD, h_MN)
            policy.late.leave(functools.partial(_weight_gradients, *given, permutation, policy.sinks))
        elif needs_down or needs_second:
            ddown = grouped_matmul(dy_MD.t(), h_MN, ends_E) if needs_down else None
            dsecond = _factor_gradients(dy_MD, h_MN, second, ends_E) if needs_second else dsecond
        del h_MN, dy_MD
        if needs_gate_up_bias:
            dgate_up_bias = _expert_sums(dz_M2N, torch.ones_like(weights_M1), ends_E)
        if policy.late is None and (needs_gate_up or needs_first):
            x_MD = take_rows(x_RD, permutation)
            dgate_up = grouped_matmul(dz_M2N.t(), x_MD, ends_E) if needs_gate_up else None
            dfirst = _factor_gradients(dz_M2N, x_MD, first, ends_E) if needs_first else dfirst
        if needs_x:
            dx_RD = sum_rows(_project_back(dz_M2N, gate_up, first, ends_E), permutation)
        gradients = (dgate_up, ddown, dgate_up_bias, ddown_bias)
        delivered = [
            None if gradient is None else deliver(gradient, sink, gate_up.dtype)
            for sink, gradient in zip(policy.sinks, gradients, strict=True)
        ]
        return dx_RD, dweights_RK, *delivered, *dfirst, *dsecond, None, None, None, None


def _weight_gradients(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    permutation: RowPermutation,
    sinks: tuple[GradSink | None, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Of gate_up and down, from the gradient of each product's result and its rows."""
    (dz_M2N, x_RD), (dy_MD, h_MN) = first, second
    ends_E, dtype = permutation.ends_G, x_RD.dtype
    dgate_up = grouped_matmul(dz_M2N.t(), take_rows(x_RD, permutation), ends_E)
    ddown = grouped_matmul(dy_MD.t(), h_MN, ends_E)
    return deliver(dgate_up, sinks[0], dtype), deliver(ddown, sinks[1], dtype)


_Factors = Sequence[Tensor | None]
"""A and B of an update, or None twice."""


def _pre_activation(
    x_RD: Tensor, gate_up: Tensor, bias: Tensor | None, factors: _Factors, permutation: RowPermutation
) -> Tensor:
    z_M2N = _project(take_rows(x_RD, permutation), gate_up, factors, permutation.ends_G)
    if bias is not None:
        z_M2N += bias.index_select(0, permutation.groups_M())
    return z_M2N


def _project(x_MI: Tensor, weight_EOI: Tensor, factors: _Factors, ends_E: Tensor) -> Tensor:
    """``W x + B (A x)``."""
    y_MO = grouped_matmul(x_MI, weight_EOI.transpose(1, 2), ends_E)
    a_EQI, b_EOQ = factors
    if a_EQI is not None and b_EOQ is not None:
        narrow_MQ = grouped_matmul(x_MI, a_EQI.transpose(1, 2), ends_E)
        y_MO += grouped_matmul(narrow_MQ, b_EOQ.transpose(1, 2), ends_E)
    return y_MO


def _project_back(dy_MO: Tensor, weight_EOI: Tensor, factors: _Factors, ends_E: Tensor) -> Tensor:
    """The gradient of what :func:`_project` was given."""
    dx_MI = grouped_matmul(dy_MO, weight_EOI, ends_E)
    a_EQI, b_EOQ = factors
    if a_EQI is not None and b_EOQ is not None:
        dx_MI += grouped_matmul(grouped_matmul(dy_MO, b_EOQ, ends_E), a_EQI, ends_E)
    return dx_MI


def _factor_gradients(
    dy_MO: Tensor, x_MI: Tensor, factors: _Factors, ends_E: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    a_EQI, b_EOQ = factors
    if a_EQI is None or b_EOQ is None:
        return None, None
    da_EQI = grouped_matmul(grouped_matmul(dy_MO, b_EOQ, ends_E).t(), x_MI, ends_E)
    db_EOQ = grouped_matmul(dy_MO.t(), grouped_matmul(x_MI, a_EQI.transpose(1, 2), ends_E), ends_E)
    return da_EQI.to(a_EQI.dtype), db_EOQ.to(b_EOQ.dtype)


def _values(weight: Tensor, scales: WeightScales | None, dtype: torch.dtype) -> Tensor:
    return weight if scales is None else decoded(weight, scales, dtype)


def _wide(tensor: Tensor) -> Tensor:
    """At least fp32: activations and sums are never done in bf16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _expert_sums(rows_MD: Tensor, weights_M1: Tensor, ends_E: Tensor) -> Tensor:
    """For each expert the weighted sum of its rows, ``[E, D]``; a grouped product, so without atomics."""
    columns = rows_MD.new_zeros(rows_MD.shape[0], 16 // rows_MD.element_size())
    columns[:, :1] = weights_M1
    return grouped_matmul(columns.t(), rows_MD, ends_E)[:, 0]
