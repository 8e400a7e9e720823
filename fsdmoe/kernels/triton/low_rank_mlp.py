"""The expert layer in bf16 with low-rank updates (LoRA) of its weights: ``W + B A`` in the place of ``W``.

Each wide product gets its update as one more step of its depth (:class:`LowRankTerm`), from a narrow product
that was made before::

    forward    x_MQ = A1 x             pre = W1 x + B1 x_MQ
               act_MQ = A2 act         y = W2 act + B2 act_MQ
    backward   dy_MQ = B2^T dy         dact = W2^T dy + A2^T dy_MQ
               dpre_MQ = B1^T dpre     dx = W1^T dpre + A1^T dpre_MQ
               dA2 = dy_MQ^T act       dB2 = dy^T act_MQ
               dA1 = dpre_MQ^T x       dB1 = dpre^T x_MQ

The narrow products are bound by reading their rows. Those of forward are kept for backward, in addition to
what ``FusedProducts`` keeps. Sizes: as there, and Q the rank of an update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fsdmoe.kernels.architecture import architecture
from fsdmoe.kernels.expert_autograd import Given, Gradient, Grads, PreActivation, compute_experts
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.triton.grouped_gemm import GateUp, LowRankTerm, gate_up, project
from fsdmoe.kernels.triton.permute_kernels import permute_rows
from fsdmoe.kernels.triton.row_map import GatheredRows, RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu import swiglu_backward_
from fsdmoe.kernels.triton.swiglu_mlp import Back, FusedProducts, WeightOperands, layer_tiles
from fsdmoe.kernels.triton.tiles import LayerTiles, factor_tiles, narrow_tile
from fsdmoe.kernels.triton.weight_grad import weight_grad

_ALIGNED = 8  # elements: bulk copies take rows of multiples of 16 bytes
_MAX_RANK = 128  # shared memory holds no larger terms


def supports_updates(updates: LowRankUpdates) -> bool:
    """Whether the kernels take these factors: bf16, in rows of 16 bytes, of rank 128 at most, on Hopper. For
    Blackwell, Triton 3.9 does not compile a product that follows a flattened loop."""
    return all(
        factor is None
        or (
            architecture(factor.device) == "hopper"
            and factor.dtype == torch.bfloat16
            and factor.is_contiguous()
            and min(factor.shape[1:]) <= _MAX_RANK
            and factor.shape[2] % _ALIGNED == 0
            and factor.storage_offset() % _ALIGNED == 0
        )
        for factor in updates
    )


def experts_mlp_low_rank(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None, updates: LowRankUpdates
) -> torch.Tensor:
    """``experts_mlp_triton`` with updates; their gradients are not left for later (``policy.late``)."""
    products = LowRankProducts.of(policy._replace(late=None), max_rows)
    rows = Rows(*(each.contiguous() for each in rows))
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.contiguous()
    weights = ExpertWeights(weights.gate_up_E2ND, weights.down_EDN, bias)
    return compute_experts(products, rows, weights, updates)


class Narrow(NamedTuple):
    """What forward's narrow products gave; None for a weight without an update."""

    x_MQ: torch.Tensor | None
    act_MQ: torch.Tensor | None


class LowRankOperands(NamedTuple):
    """Of all gradients of weights and factors."""

    wide: WeightOperands
    narrow: Narrow
    dy_MQ: torch.Tensor | None
    dpre_MQ: torch.Tensor | None


class LowRankProducts(FusedProducts):
    """See :class:`~fsdmoe.kernels.expert_autograd.ExpertProducts`."""

    def gate_up(self, given: Given, ids_RK: torch.Tensor, *, keep: bool) -> tuple[list[Any], Any]:
        tiles = layer_tiles(ids_RK, given.down_EDN, self.spare_sms)
        row_map = build_row_map(ids_RK, len(given.down_EDN), align=tiles.align, max_rows=self.max_rows)
        rows = self._rows(given.x_RD, row_map, tiles)
        x_MQ = self._narrow(rows, given.gate_up_a, row_map, transposed=True)
        pre_2MN, act_MN = self._first(given, rows, x_MQ, row_map, tiles, keep=keep and not self.recompute)
        act_MQ = self._narrow(act_MN, given.down_a, row_map, transposed=True)
        kept = PreActivation(pre_2MN), row_map, Narrow(x_MQ, act_MQ)
        return [act_MN, low_rank_term(act_MQ, given.down_b), row_map, tiles], kept

    def down_dgrad(
        self, dy_RD: torch.Tensor, given: Given, kept: list[Any], grads: Grads
    ) -> tuple[LowRankOperands, Back]:
        (pre_2MN,), row_map, narrow = kept
        kept.clear()
        tiles = layer_tiles(row_map.position_RK, given.down_EDN, self.spare_sms)
        if pre_2MN is None:
            rows = self._rows(given.x_RD, row_map, tiles)
            pre_2MN, _ = self._first(given, rows, narrow.x_MQ, row_map, tiles, keep=True)
        assert pre_2MN is not None
        dweights_RK = torch.empty(given.weights_RK.shape, device=dy_RD.device, dtype=torch.float32)
        dy_MD = permute_rows(dy_RD.contiguous(), row_map, clear_RK=dweights_RK)
        dy_MQ = self._narrow(dy_MD, given.down_b, row_map, transposed=False)
        dact_MN = self._back(dy_MD, given.down_EDN, row_map, tiles, low_rank_term(dy_MQ, given.down_a))
        dpre_M2N = swiglu_backward_(
            pre_2MN, dact_MN, given.weights_RK, row_map, dweights_RK,
            activation=self.activation, limit=self.limit,
        )  # fmt: skip
        if grads.weights_RK is not None:
            grads.weights_RK.put(dweights_RK)
        dpre_MQ = self._narrow(dpre_M2N, given.gate_up_b, row_map, transposed=False)
        # ``swiglu_backward_`` has overwritten dact with the activation.
        wide = WeightOperands([dy_MD, dact_MN], dpre_M2N, given.x_RD, row_map)
        term = low_rank_term(dpre_MQ, given.gate_up_a)
        return LowRankOperands(wide, narrow, dy_MQ, dpre_MQ), (dpre_M2N, term, row_map)

    def wgrad(self, operands: LowRankOperands, grads: Grads) -> None:
        factor_gradients(operands, grads, self.wgrad_spare_sms)
        super().wgrad(operands.wide, grads)

    # The products themselves

    def _rows(self, x_RD: torch.Tensor, row_map: RowMap, tiles: LayerTiles) -> torch.Tensor | GatheredRows:
        gathered = tiles.gathered and len(x_RD) > 0
        return GatheredRows(x_RD) if gathered else permute_rows(x_RD, row_map)

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
        return gate_up(
            x, given.weights_RK, first, row_map, gathered=gathered, store_pre=keep,
            tile=tiles.project, term=low_rank_term(x_MQ, given.gate_up_b),
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


def narrow_product(
    rows: torch.Tensor | GatheredRows,
    factor: torch.Tensor | None,
    row_map: RowMap,
    *,
    transposed: bool,
    spare_sms: int = 0,
) -> torch.Tensor | None:
    """``A x`` (transposed) or ``B^T dy`` for every row, ``[M, Q]``."""
    if factor is None:
        return None
    rank = factor.shape[1] if transposed else factor.shape[2]
    tile = narrow_tile(row_map.capacity // len(row_map.tile_expert), rank, spare_sms)
    return project(rows, factor, row_map, transposed=transposed, tile=tile)


def factor_gradients(operands: LowRankOperands, grads: Grads, spare_sms: int = 0) -> None:
    """Of all factors that want one."""
    wide, narrow, dy_MQ, dpre_MQ = operands
    dy, act_MN = wide.down
    rows = GatheredRows(wide.x) if len(wide.x) else permute_rows(wide.x, wide.row_map)
    for left_MA, right_MB, gradient in (
        (dy_MQ, act_MN, grads.down_a),
        (dy, narrow.act_MQ, grads.down_b),
        (dpre_MQ, rows, grads.gate_up_a),
        (wide.dpre_M2N, narrow.x_MQ, grads.gate_up_b),
    ):
        _factor_grad(left_MA, right_MB, wide.row_map, gradient, spare_sms)


def _factor_grad(
    left_MA: torch.Tensor | GatheredRows | None,
    right_MB: torch.Tensor | GatheredRows | None,
    row_map: RowMap,
    gradient: Gradient | None,
    spare_sms: int,
) -> None:
    if gradient is None or left_MA is None or right_MB is None:
        return
    if isinstance(left_MA, GatheredRows):  # products gather what is on their right: narrow^T rows
        assert isinstance(right_MB, torch.Tensor)
        shape = row_map.num_experts, right_MB.shape[1], left_MA.x_RD.shape[1]
        transposed_EBA = torch.empty(shape, device=right_MB.device, dtype=torch.float32)
        tile, _ = factor_tiles(min(shape[1:]), spare_sms)
        weight_grad(right_MB, left_MA, row_map, transposed_EBA, accumulate=False, tile=tile)
        gradient.put(transposed_EBA.mT)
    elif (place := gradient.place()) is not None:
        buffer, accumulate = place
        _, a, b = buffer.shape
        of_a, of_b = factor_tiles(min(a, b), spare_sms)
        tile = of_a if a < b else of_b
        weight_grad(left_MA, right_MB, row_map, buffer, accumulate=accumulate, tile=tile)


def low_rank_term(narrow_MQ: torch.Tensor | None, factor: torch.Tensor | None) -> LowRankTerm | None:
    return None if narrow_MQ is None or factor is None else LowRankTerm(narrow_MQ, factor)
