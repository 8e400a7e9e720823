"""What low-rank updates (LoRA) of experts' weights add to the products of ``swiglu_mlp``: ``W + B A`` in the
place of ``W``.

Each wide product gets its update as one more step of its depth (:class:`LowRankTerm`), from a narrow product
that was made before::

    forward    x_MQ = A1 x             pre = W1 x + B1 x_MQ
               act_MQ = A2 act         y = W2 act + B2 act_MQ
    backward   dy_MQ = B2^T dy         dact = W2^T dy + A2^T dy_MQ
               dpre_MQ = B1^T dpre     dx = W1^T dpre + A1^T dpre_MQ
               dA2 = dy_MQ^T act       dB2 = dy^T act_MQ
               dA1 = dpre_MQ^T x       dB1 = dpre^T x_MQ

The narrow products are bound by reading their rows. Those of forward are kept for backward. Sizes: as in
``swiglu_mlp``, and Q the rank of an update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fsdmoe.kernels.architecture import architecture
from fsdmoe.kernels.expert_autograd import Gradient, Grads
from fsdmoe.kernels.expert_operands import LowRankUpdates
from fsdmoe.kernels.triton.grouped_gemm import LowRankTerm, project
from fsdmoe.kernels.triton.permute_kernels import permute_rows
from fsdmoe.kernels.triton.row_map import GatheredRows, RowMap
from fsdmoe.kernels.triton.tiles import factor_tiles, narrow_tile
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


class Narrow(NamedTuple):
    """What forward's narrow products gave; None for a weight without an update."""

    x_MQ: torch.Tensor | None
    act_MQ: torch.Tensor | None


class WeightOperands(NamedTuple):
    """Of the gradients of weights and of their updates' factors."""

    down: list[Any]
    """Gradients of outputs (sorted, or ``GatheredRows`` where only factors have gradients), and activations;
    given up once they have been used."""
    dpre_M2N: torch.Tensor
    x: torch.Tensor
    """``[R, D]``; ``[M, D]`` where sorted rows were kept."""
    is_sorted: bool
    row_map: RowMap
    narrow: Narrow
    dy_MQ: torch.Tensor | None
    dpre_MQ: torch.Tensor | None

    def sorted_x(self) -> torch.Tensor:
        return self.x if self.is_sorted else permute_rows(self.x, self.row_map)


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


def factor_gradients(operands: WeightOperands, grads: Grads, spare_sms: int = 0) -> None:
    """Of all factors that want one."""
    dy, act_MN = operands.down
    is_gathered = len(operands.x) and not operands.is_sorted
    rows = GatheredRows(operands.x) if is_gathered else operands.sorted_x()
    for left_MA, right_MB, gradient in (
        (operands.dy_MQ, act_MN, grads.down_a),
        (dy, operands.narrow.act_MQ, grads.down_b),
        (operands.dpre_MQ, rows, grads.gate_up_a),
        (operands.dpre_M2N, operands.narrow.x_MQ, grads.gate_up_b),
    ):
        _factor_grad(left_MA, right_MB, operands.row_map, gradient, spare_sms)


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
