"""Experts in fp8 with low-rank updates (LoRA) of their frozen weights: ``W + B A`` in the place of ``W``.

Wide products are those of ``fp8_mlp``, of codes that a frozen weight keeps (``precision.frozen_dtype``) or
that are made of it. Each gets its update, in bf16, as one more step of its depth, from a narrow product that
was made before; nothing of the update is quantised but what its rows are anyway::

    forward    x_MQ = A1 x             pre = W1 x + B1 x_MQ          x as codes in W1 x alone
               act_MQ = A2 act         y = W2 act + B2 act_MQ        act as codes in both
    backward   dy_MQ = B2^T dy         dact = W2^T dy + A2^T dy_MQ   dy as codes in W2^T dy alone
               dpre_MQ = B1^T dpre     dx = W1^T dpre + A1^T dpre_MQ

Gradients of factors are those of ``triton/low_rank_terms.py``, in bf16. Weights get none, so the panels of
``fp8_mlp`` are not made. Sizes: as there, and Q the rank of an update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdmoe.kernels.expert_autograd import Given, Grads, PreActivation, compute_experts
from fsdmoe.kernels.expert_operands import ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.gluon import fp8_launch as gemm
from fsdmoe.kernels.gluon.fp8_mlp import BlockwiseProducts
from fsdmoe.kernels.triton.fp8_low_rank_rows import narrow_of_codes
from fsdmoe.kernels.triton.fp8_rows import Codes, empty_codes, quantize_rows
from fsdmoe.kernels.triton.fp8_scale import BLOCK
from fsdmoe.kernels.triton.grouped_gemm import LowRankTerm
from fsdmoe.kernels.triton.low_rank_terms import (
    Narrow,
    WeightOperands,
    factor_gradients,
    low_rank_term,
    narrow_product,
    supports_updates,
)
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import GatheredRows, RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import WantedCodes, swiglu_backward_
from fsdmoe.precision.formats import Recipe, blockwise_scale
from fsdmoe.precision.quantized_weight import scales_of


def supports_fp8_updates(weights: ExpertWeights, updates: LowRankUpdates) -> bool:
    """Whether the kernels take these factors, next to weights that ``supports_fp8`` takes: frozen ones."""
    is_trained = weights.gate_up_E2ND.requires_grad or weights.down_EDN.requires_grad
    return not is_trained and supports_updates(updates)


class LowRankBlockwise(BlockwiseProducts):
    """See :class:`~fsdmoe.kernels.expert_autograd.ExpertProducts`."""

    def gate_up(self, given: Given, ids_RK: Tensor, *, keep: bool) -> tuple[list[Any], Any]:
        x_RD = given.x_RD
        row_map = build_row_map(ids_RK, given.down_EDN.shape[0], align=BLOCK, max_rows=self.max_rows)
        rows = GatheredRows(x_RD) if len(x_RD) else permute_rows(x_RD, row_map)
        x_MQ = narrow_product(rows, given.gate_up_a, row_map, transposed=True)
        pre_2MN, act = gemm.gate_up(
            quantize_rows(x_RD, row_map, power_of_two=self.power_of_two),
            given.weights_RK,
            self._forward_codes(given.gate_up_E2ND, self.gate_up_scales),
            row_map,
            keep="values" if keep else "nothing",
            power_of_two=self.power_of_two,
            dtype=x_RD.dtype,
            term=low_rank_term(x_MQ, given.gate_up_b),
        )
        assert not isinstance(pre_2MN, Codes)  # codes were not asked for
        act_MQ = None if given.down_a is None else narrow_of_codes(act, given.down_a, row_map)
        kept = PreActivation(pre_2MN), row_map, Narrow(x_MQ, act_MQ)
        return [act, act_MQ, row_map], kept if keep else ()

    def down(self, given: Given, activated: list[Any]) -> Tensor:
        act, act_MQ, row_map = activated
        down = self._forward_codes(given.down_EDN, self.down_scales)
        term = low_rank_term(act_MQ, given.down_b)
        return combine_rows(gemm.project(act, down, row_map, dtype=given.x_RD.dtype, term=term), row_map)

    def down_dgrad(
        self, dy_RD: Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[WeightOperands, tuple[Codes, Tensor | None, RowMap]]:
        (pre_2MN,), row_map, narrow = kept
        kept.clear()
        dy_RD = dy_RD.contiguous()
        weights_RK = given.weights_RK
        dweights_RK = torch.zeros(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
        # Only narrow products read dy in bf16, which do not need the permuted copy: it would be the largest
        # tensor here.
        dy = GatheredRows(dy_RD) if len(dy_RD) else permute_rows(dy_RD, row_map)
        dy_MQ = narrow_product(dy, given.down_b, row_map, transposed=False)
        dact_MN = gemm.project(
            quantize_rows(dy_RD, row_map, power_of_two=self.power_of_two),
            self._transposed(given.down_EDN, self.down_scales),
            row_map,
            dtype=dy_RD.dtype,
            term=_transposed_term(dy_MQ, given.down_a),
        )
        dpre = empty_codes(len(dact_MN), 2 * dact_MN.shape[1], dact_MN.device)
        codes = WantedCodes(*dpre, self.power_of_two)
        dpre_M2N = swiglu_backward_(pre_2MN, dact_MN, weights_RK, row_map, dweights_RK, codes=codes)
        if grads.weights_RK is not None:
            grads.weights_RK.put(dweights_RK)
        dpre_MQ = narrow_product(dpre_M2N, given.gate_up_b, row_map, transposed=False)
        # ``swiglu_backward_`` has overwritten dact with the activation.
        operands = WeightOperands([dy, dact_MN], dpre_M2N, given.x_RD, False, row_map, narrow, dy_MQ, dpre_MQ)
        return operands, (dpre, dpre_MQ, row_map)

    def wgrad(self, operands: WeightOperands, grads: Grads) -> None:
        factor_gradients(operands, grads)
        operands.down.clear()

    def gate_up_dgrad(
        self, operands: tuple[Codes, Tensor | None, RowMap], given: Given, grads: Grads
    ) -> None:
        dpre, dpre_MQ, row_map = operands
        if grads.x_RD is not None:
            gate_up = self._transposed(given.gate_up_E2ND, self.gate_up_scales)
            term = _transposed_term(dpre_MQ, given.gate_up_a)
            dx_MD = gemm.project(dpre, gate_up, row_map, dtype=given.x_RD.dtype, term=term)
            grads.x_RD.put(combine_rows(dx_MD, row_map))


def _transposed_term(narrow_MQ: Tensor | None, factor_EQN: Tensor | None) -> LowRankTerm | None:
    """The products read factors, like weights, with what they contract innermost."""
    return None if factor_EQN is None else low_rank_term(narrow_MQ, factor_EQN.mT.contiguous())


def experts_mlp_fp8_low_rank(
    rows: Rows, weights: ExpertWeights, recipe: Recipe, max_rows: int | None, updates: LowRankUpdates
) -> Tensor:
    """``experts_mlp_fp8`` with updates, and without gradients of the weights."""
    products = LowRankBlockwise(
        blockwise_scale(recipe) == "power_of_two",
        max_rows,
        scales_of(weights.gate_up_E2ND),
        scales_of(weights.down_EDN),
    )
    rows = Rows(*(each.contiguous() for each in rows))
    return compute_experts(products, rows, ExpertWeights(weights.gate_up_E2ND, weights.down_EDN), updates)
