"""``experts_mlp_triton``: the expert layer's local compute on Hopper in bf16, as one differentiable function.

    y_r = Σ_k down[e] (p · silu(gate[e] x_r) · up[e] x_r),   e = ids[r, k], p = weights[r, k], summed in fp32

    forward    map rows -> [permute x] -> gate_up (SwiGLU × weight) -> down -> combine
    backward   permute dy -> d act -> SwiGLU backward -> d down; permute x -> d gate_up; d x -> combine

Any gated activation takes SwiGLU's place on request, and gate_up may have a bias. One of the second
projection is a narrow product of its own (``expert_mlp.py``): it needs no activation.

An id of -1 contributes nothing. Only x, the router weights, the pre-activation (unless it is recomputed) and
the row map are kept for backward; on request, in place of x, the permuted rows and the activation. Weight
gradients go straight to a parameter's gradient sink where it has one. Nothing here waits for the device, so a
CUDA graph can capture it.

Legend: R rows in, K choices a row, D hidden size, N expert width, E experts, M sorted rows with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from fsdmoe.kernels.activations import ACTIVATIONS as EXPERT_ACTIVATIONS
from fsdmoe.kernels.activations import GPT_OSS_LIMIT
from fsdmoe.kernels.expert_autograd import (
    Given,
    Gradient,
    Grads,
    PreActivation,
    SortedRows,
    compute_experts,
)
from fsdmoe.kernels.expert_operands import DEFAULT_POLICY, ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.triton.grouped_gemm import GateUp, LowRankTerm, gate_up, project
from fsdmoe.kernels.triton.launch import has_bulk_copies
from fsdmoe.kernels.triton.low_rank_terms import (
    Narrow,
    WeightOperands,
    factor_gradients,
    low_rank_term,
    narrow_product,
)
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import GatheredRows, RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import swiglu_backward_
from fsdmoe.kernels.triton.tiles import LayerTiles, grad_tile, tiles_for
from fsdmoe.kernels.triton.weight_grad import bias_grad, weight_grad

_MAX_EXPERTS = 1024
ACTIVATIONS = tuple(name for name, how in EXPERT_ACTIVATIONS.items() if how.is_gated)


def supports(
    x_RD: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    activation: str = "swiglu",
) -> bool:
    """Whether these tensors can take the Triton path: bf16 on Hopper or later, 16-byte rows, gated
    experts."""
    weights = (gate_up_E2ND, down_EDN)
    return supports_shape(x_RD, down_EDN.shape, activation) and all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.storage_offset() % 8 == 0 and t.is_contiguous()
        for t in weights
    )


def supports_shape(x_RD: torch.Tensor, down_EDN: Sequence[int], activation: str) -> bool:
    """The same for weights that will be made for the call, of a second projection of this shape."""
    if activation not in ACTIVATIONS or not (x_RD.is_cuda and x_RD.dtype == torch.bfloat16):
        return False
    num_experts, d, n = down_EDN
    is_aligned = d % 8 == 0 and n % 8 == 0 and x_RD.storage_offset() % 8 == 0
    return is_aligned and num_experts <= _MAX_EXPERTS and has_bulk_copies(x_RD.device)


def layer_tiles(ids_RK: torch.Tensor, down_EDN: torch.Tensor, spare_sms: int = 0) -> LayerTiles:
    num_experts, d, n = down_EDN.shape
    return tiles_for(ids_RK.shape[0] * ids_RK.shape[1], num_experts, d, n, spare_sms)


Kept = tuple[PreActivation, RowMap, Narrow, SortedRows]
Back = tuple[torch.Tensor, LowRankTerm | None, RowMap]
"""Gradients of pre-activations, and what is added to their product with the weight."""


@dataclass(frozen=True, kw_only=True)
class FusedProducts:
    """See :class:`~fsdmoe.kernels.expert_autograd.ExpertProducts`: in bf16, over rows sorted by expert, with
    or without updates of weights.

    With ``keeps_rows`` forward lays rows out once and multiplies by the copy, and gradients of weights take
    what it left: backward spares two passes over ``[M, D]`` and one over ``[M, N]``, and is given no x."""

    max_rows: int | None = None
    recompute: bool = False
    keeps_rows: bool = False
    activation: str = "swiglu"
    limit: float = GPT_OSS_LIMIT
    spare_sms: int = 0
    wgrad_spare_sms: int = 0

    @classmethod
    def of(cls, policy: ExpertPolicy, max_rows: int | None) -> Self:
        late = policy.late
        return cls(
            max_rows=max_rows,
            recompute=policy.recompute,
            keeps_rows=policy.keeps_rows,
            activation=policy.activation,
            limit=policy.limit,
            spare_sms=policy.spare_sms,
            wgrad_spare_sms=policy.spare_sms if late is None else late.spare_sms,
        )

    def gate_up(self, given: Given, ids_RK: torch.Tensor, *, keep: bool) -> tuple[list[Any], Kept]:
        tiles = layer_tiles(ids_RK, given.down_EDN, self.spare_sms)
        row_map = build_row_map(ids_RK, len(given.down_EDN), align=tiles.align, max_rows=self.max_rows)
        keeps_rows = keep and self.keeps_rows
        rows = self._rows(given.x_RD, row_map, gathered=tiles.gathered and not keeps_rows)
        x_MQ = self._narrow(rows, given.gate_up_a, row_map, transposed=True)
        pre_2MN, act_MN = self._first(given, rows, x_MQ, row_map, tiles, keep=keep and not self.recompute)
        act_MQ = self._narrow(act_MN, given.down_a, row_map, transposed=True)
        kept_rows = SortedRows(None, None)
        if keeps_rows and isinstance(rows, torch.Tensor):
            kept_rows = SortedRows(rows, act_MN)
        kept = PreActivation(pre_2MN), row_map, Narrow(x_MQ, act_MQ), kept_rows
        return [act_MN, low_rank_term(act_MQ, given.down_b), row_map, tiles], kept

    def down(self, given: Given, activated: list[Any]) -> torch.Tensor:
        act_MN, term, row_map, tiles = activated
        return combine_rows(self._down(act_MN, given.down_EDN, row_map, tiles, term), row_map)

    def down_dgrad(
        self, dy_RD: torch.Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[WeightOperands, Back]:
        (pre_2MN,), row_map, narrow, (x_MD, act_MN) = kept
        kept.clear()
        weights_RK = given.weights_RK
        tiles = layer_tiles(row_map.position_RK, given.down_EDN, self.spare_sms)
        if pre_2MN is None:
            rows = self._rows(given.x_RD, row_map, gathered=tiles.gathered) if x_MD is None else x_MD
            pre_2MN, _ = self._first(given, rows, narrow.x_MQ, row_map, tiles, keep=True)
        assert pre_2MN is not None
        dweights_RK = torch.empty(weights_RK.shape, device=weights_RK.device, dtype=torch.float32)
        dy_MD = permute_rows(dy_RD.contiguous(), row_map, clear_RK=dweights_RK)
        dy_MQ = self._narrow(dy_MD, given.down_b, row_map, transposed=False)
        term = low_rank_term(dy_MQ, given.down_a)
        dact_MN = self._back(dy_MD, given.down_EDN, row_map, tiles, term)
        dpre_M2N = swiglu_backward_(
            pre_2MN, dact_MN, weights_RK, row_map, dweights_RK,
            activation=self.activation, limit=self.limit, wants_act=act_MN is None,
        )  # fmt: skip
        if grads.weights_RK is not None:
            grads.weights_RK.put(dweights_RK)
        dpre_MQ = self._narrow(dpre_M2N, given.gate_up_b, row_map, transposed=False)
        operands = WeightOperands(
            # ``swiglu_backward_`` has overwritten dact with the activation where it was not kept.
            [dy_MD, dact_MN if act_MN is None else act_MN],
            dpre_M2N,
            given.x_RD if x_MD is None else x_MD,
            x_MD is not None,
            row_map,
            narrow,
            dy_MQ,
            dpre_MQ,
        )
        return operands, (dpre_M2N, low_rank_term(dpre_MQ, given.gate_up_a), row_map)

    def wgrad(self, operands: WeightOperands, grads: Grads) -> None:
        if any((grads.gate_up_a, grads.gate_up_b, grads.down_a, grads.down_b)):
            factor_gradients(operands, grads, self.wgrad_spare_sms)
        row_map = operands.row_map
        dy_MD, act_MN = operands.down
        operands.down.clear()
        if grads.down_EDN is not None:
            self._weight_grad(dy_MD, act_MN, row_map, grads.down_EDN)
        del dy_MD, act_MN  # before the rows of x are laid out again
        if grads.gate_up_E2ND is not None:
            self._weight_grad(operands.dpre_M2N, operands.sorted_x(), row_map, grads.gate_up_E2ND)

    def gate_up_dgrad(self, operands: Back, given: Given, grads: Grads) -> None:
        dpre_M2N, term, row_map = operands
        if grads.gate_up_bias is not None:
            grads.gate_up_bias.put(bias_grad(dpre_M2N, row_map))
        if grads.x_RD is not None:
            tiles = layer_tiles(row_map.position_RK, given.down_EDN, self.spare_sms)
            dx_MD = self._back(dpre_M2N, given.gate_up_E2ND, row_map, tiles, term)
            grads.x_RD.put(combine_rows(dx_MD, row_map))

    # The products themselves

    def _rows(self, x_RD: torch.Tensor, row_map: RowMap, *, gathered: bool) -> torch.Tensor | GatheredRows:
        return GatheredRows(x_RD) if gathered and len(x_RD) else permute_rows(x_RD, row_map)

    def _first(
        self,
        given: Given,
        rows: torch.Tensor | GatheredRows,
        x_MQ: torch.Tensor | None,
        row_map: RowMap,
        tiles: LayerTiles,
        *,
        keep: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The pre-activation if ``keep``, and the weighted activation."""
        gathered = isinstance(rows, GatheredRows)
        x = rows.x_RD if isinstance(rows, GatheredRows) else rows
        first = GateUp(given.gate_up_E2ND, given.gate_up_bias, self.activation, self.limit)
        term = low_rank_term(x_MQ, given.gate_up_b)
        return gate_up(
            x, given.weights_RK, first, row_map, gathered=gathered, store_pre=keep,
            tile=tiles.gate_up if term is None else tiles.project, term=term,
        )  # fmt: skip

    def _narrow(
        self,
        rows: torch.Tensor | GatheredRows,
        factor: torch.Tensor | None,
        row_map: RowMap,
        *,
        transposed: bool,
    ) -> torch.Tensor | None:
        return narrow_product(rows, factor, row_map, transposed=transposed, spare_sms=self.spare_sms)

    def _down(
        self,
        act_MN: torch.Tensor,
        down_EDN: torch.Tensor,
        row_map: RowMap,
        tiles: LayerTiles,
        term: LowRankTerm | None,
    ) -> torch.Tensor:
        tile = tiles.project_to(down_EDN.shape[1]) if term is None else tiles.project
        return project(act_MN, down_EDN, row_map, transposed=True, tile=tile, term=term)

    def _back(
        self,
        dy_MO: torch.Tensor,
        weight_EOI: torch.Tensor,
        row_map: RowMap,
        tiles: LayerTiles,
        term: LowRankTerm | None = None,
    ) -> torch.Tensor:
        """The gradient of what was multiplied by ``weight``."""
        tile = tiles.project_to(weight_EOI.shape[2]) if term is None else tiles.project
        return project(dy_MO, weight_EOI, row_map, transposed=False, tile=tile, term=term)

    def _weight_grad(
        self, left_MA: torch.Tensor, right_MB: torch.Tensor, row_map: RowMap, gradient: Gradient
    ) -> None:
        for first, buffer, accumulate in gradient.places():
            tile = grad_tile(buffer, accumulate, self.wgrad_spare_sms)
            weight_grad(
                left_MA, right_MB, row_map, buffer, accumulate=accumulate, tile=tile, first_expert=first
            )


def experts_mlp_triton(
    x_RD: torch.Tensor,
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    gate_up_E2ND: torch.Tensor,
    down_EDN: torch.Tensor,
    *,
    policy: ExpertPolicy = DEFAULT_POLICY,
    max_rows: int | None = None,
    gate_up_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts' output for every row; differentiable in x, weights, gate_up, down and gate_up's bias
    ``[E, 2N]``.

    ``max_rows`` bounds how many ids are not -1, where the caller knows it without asking the device:
    buffers are then that large instead of R·K rows. A bound that proves too small gives NaN, not a partial
    sum.
    """
    x_RD, weights_RK, ids_RK = x_RD.contiguous(), weights_RK.contiguous(), ids_RK.contiguous()
    gate_up_bias = None if gate_up_bias is None else gate_up_bias.contiguous()
    rows = Rows(x_RD, weights_RK, ids_RK)
    weights = ExpertWeights(gate_up_E2ND, down_EDN, gate_up_bias)
    products = FusedProducts.of(policy, max_rows)
    return compute_experts(products, rows, weights, late=policy.late, keeps_x=not policy.keeps_rows)
