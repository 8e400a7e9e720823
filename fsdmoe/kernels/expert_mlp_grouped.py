"""The experts' products in plain torch: grouped matrix products, on any device and in any dtype.

Backward keeps the input and the pre-activation, ``2·R·D + 4·M·N`` bytes in bf16 for M assignments (the input
alone under ``ExpertPolicy.recompute``; under ``keeps_rows`` sorted rows and activations in place of the
input, ``2·M·(D + N)``), and next to them only what is small: routing weights and indices. The experts' output
is not needed: a routing weight's gradient is ``(dy W2) · h`` (plus ``dy · b2``), whether the
weight multiplies before W2 or after it.

Sizes: R rows, K assignments a row, M slots (see ``permute``), E experts here, D hidden, N expert width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.kernels.activations import activate, activate_backward
from fsdmoe.kernels.expert_autograd import Given, Grads, PreActivation, SortedRows
from fsdmoe.kernels.expert_operands import ExpertPolicy
from fsdmoe.kernels.grouped import Projection, grouped_matmul
from fsdmoe.kernels.low_rank import LowRank
from fsdmoe.kernels.permute import (
    RowPermutation,
    group_assignments,
    put_assignments,
    sum_rows,
    take_assignments,
    take_rows,
)

Kept = tuple[PreActivation, RowPermutation, SortedRows]


class SlotOperands(NamedTuple):
    down: list[Tensor]
    """Gradients of outputs, and activations; given up once they have been used."""
    dz_M2N: Tensor
    x_RD: Tensor
    x_MD: Tensor | None
    """Where sorted rows were kept."""
    projections: tuple[Projection, Projection]
    permutation: RowPermutation


class GroupedProducts(NamedTuple):
    """See :class:`~fsdmoe.kernels.expert_autograd.ExpertProducts`."""

    policy: ExpertPolicy
    max_rows: int | None

    def gate_up(self, given: Given, ids_RK: Tensor, *, keep: bool) -> tuple[list[Any], Kept]:
        dtype = given.x_RD.dtype
        num_experts = given.gate_up_E2ND.shape[0]
        permutation = group_assignments(ids_RK, num_experts, max_assignments=self.max_rows)
        gate_up = _projection(given.gate_up_E2ND, given.gate_up_a, given.gate_up_b)
        x_MD = take_rows(given.x_RD, permutation)
        z_M2N = _pre_activation(given, x_MD, gate_up, permutation)
        rows = SortedRows(x_MD if self.policy.keeps_rows else None, None)
        del x_MD
        weights_M1 = take_assignments(given.weights_RK, permutation).unsqueeze(-1)
        h_MN = activate(_wide(z_M2N), self.policy.activation, self.policy.limit)
        if not self.policy.weight_after:
            h_MN *= weights_M1
        h_MN = h_MN.to(dtype)
        if self.policy.keeps_rows:
            rows = rows._replace(act_MN=h_MN)
        kept = PreActivation(None if self.policy.recompute else z_M2N), permutation, rows
        return [h_MN, weights_M1, permutation], kept

    def down(self, given: Given, activated: list[Any]) -> Tensor:
        h_MN, weights_M1, permutation = activated
        activated.clear()
        down = _projection(given.down_EDN, given.down_a, given.down_b)
        y_MD = down.forward(h_MN, permutation.ends_G)
        del h_MN
        if given.down_bias is not None:
            bias_MD = given.down_bias.index_select(0, permutation.groups_M())
            y_MD += bias_MD if self.policy.weight_after else bias_MD * weights_M1
        return sum_rows(y_MD, permutation, given.weights_RK if self.policy.weight_after else None)

    def down_dgrad(
        self, dy_RD: Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[SlotOperands, tuple[Tensor, Projection, RowPermutation]]:
        (z_M2N,), permutation, rows = kept
        kept.clear()
        dtype = given.x_RD.dtype
        ends_E = permutation.ends_G
        weights_M1 = take_assignments(given.weights_RK, permutation).unsqueeze(-1)
        dy_MD = take_rows(dy_RD, permutation)
        down = _projection(given.down_EDN, given.down_a, given.down_b)
        dh_MN = _wide(down.dgrad(dy_MD, ends_E))  # unweighted, under either policy
        gate_up = _projection(given.gate_up_E2ND, given.gate_up_a, given.gate_up_b)
        if z_M2N is None:
            x_MD = take_rows(given.x_RD, permutation) if rows.x_MD is None else rows.x_MD
            z_M2N = _pre_activation(given, x_MD, gate_up, permutation)
            del x_MD
        z_wide = _wide(z_M2N)
        del z_M2N
        h_MN = activate(z_wide, self.policy.activation, self.policy.limit)
        if grads.weights_RK is not None:
            dweights_M = (dh_MN * h_MN).sum(-1)
            if given.down_bias is not None:
                bias_MD = given.down_bias.index_select(0, permutation.groups_M())
                dweights_M += (_wide(dy_MD) * bias_MD).sum(-1)
                del bias_MD
            grads.weights_RK.put(put_assignments(dweights_M, permutation))
        dh_MN.mul_(weights_M1)
        dz_M2N = activate_backward(z_wide, dh_MN, self.policy.activation, self.policy.limit).to(dtype)
        del dh_MN, z_wide
        if grads.down_bias is not None:
            grads.down_bias.put(_expert_sums(dy_MD, weights_M1, ends_E))
        if any((grads.down_EDN, grads.down_a, grads.down_b)):
            if self.policy.weight_after:
                dy_MD = (dy_MD * weights_M1).to(dy_MD.dtype)
            elif rows.act_MN is None:
                h_MN *= weights_M1
            h_MN = h_MN.to(dy_MD.dtype) if rows.act_MN is None else rows.act_MN
        operands = SlotOperands([dy_MD, h_MN], dz_M2N, given.x_RD, rows.x_MD, (gate_up, down), permutation)
        return operands, (dz_M2N, gate_up, permutation)

    def wgrad(self, operands: SlotOperands, grads: Grads) -> None:
        gate_up, down = operands.projections
        ends_E = operands.permutation.ends_G
        dy_MD, h_MN = operands.down
        operands.down.clear()
        down.wgrad(dy_MD, h_MN, ends_E, grads.down_EDN, grads.down_a, grads.down_b)
        del dy_MD, h_MN  # before the rows of x are laid out again
        wanted = grads.gate_up_E2ND, grads.gate_up_a, grads.gate_up_b
        if any(wanted):
            x_MD = operands.x_MD
            if x_MD is None:
                x_MD = take_rows(operands.x_RD, operands.permutation)
            gate_up.wgrad(operands.dz_M2N, x_MD, ends_E, *wanted)

    def gate_up_dgrad(
        self, operands: tuple[Tensor, Projection, RowPermutation], given: Given, grads: Grads
    ) -> None:
        dz_M2N, gate_up, permutation = operands
        if grads.gate_up_bias is not None:
            ones_M1 = given.weights_RK.new_ones(permutation.num_slots, 1)
            grads.gate_up_bias.put(_expert_sums(dz_M2N, ones_M1, permutation.ends_G))
        if grads.x_RD is not None:
            grads.x_RD.put(sum_rows(gate_up.dgrad(dz_M2N, permutation.ends_G), permutation))


def _projection(weight: Tensor, a: Tensor | None, b: Tensor | None) -> Projection:
    return Projection(weight) if a is None or b is None else LowRank(weight, a, b)


def _pre_activation(given: Given, x_MD: Tensor, gate_up: Projection, permutation: RowPermutation) -> Tensor:
    z_M2N = gate_up.forward(x_MD, permutation.ends_G)
    if given.gate_up_bias is not None:
        z_M2N += given.gate_up_bias.index_select(0, permutation.groups_M())
    return z_M2N


def _wide(tensor: Tensor) -> Tensor:
    """At least fp32: activations and sums are never done in bf16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _expert_sums(rows_MD: Tensor, weights_M1: Tensor, ends_E: Tensor) -> Tensor:
    """For each expert the weighted sum of its rows, ``[E, D]``; a grouped product, so without atomics."""
    columns = rows_MD.new_zeros(rows_MD.shape[0], 16 // rows_MD.element_size())
    columns[:, :1] = weights_M1
    return grouped_matmul(columns.t(), rows_MD, ends_E)[:, 0]
