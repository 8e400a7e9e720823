"""Experts by given products, whatever the device would choose."""

from __future__ import annotations

from torch import Tensor

from fsdmoe.kernels.expert_mlp import compute_by
from fsdmoe.kernels.expert_operands import (
    DEFAULT_POLICY,
    NO_UPDATES,
    ExpertPolicy,
    ExpertWeights,
    LowRankUpdates,
    Rows,
)


def experts_mlp_grouped(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy = DEFAULT_POLICY,
    max_rows: int | None = None,
    updates: LowRankUpdates = NO_UPDATES,
) -> Tensor:
    """``experts_mlp`` by grouped products of plain torch."""
    return compute_by(None, rows, weights, policy, max_rows, updates)


def experts_mlp_fused(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy = DEFAULT_POLICY,
    max_rows: int | None = None,
    updates: LowRankUpdates = NO_UPDATES,
) -> Tensor:
    """``experts_mlp`` by Triton's products."""
    from fsdmoe.kernels import triton

    return compute_by(triton, rows, weights, policy, max_rows, updates)
