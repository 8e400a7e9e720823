"""What computes a rank's own experts with clones of others behind them: one call, as if they were its own.

=====================  ====================================================================================
no recipe              Triton or grouped products, as without clones
``fp8_blockwise``      its kernels, over joined codes; gradients of clones leave them in float32
any recipe, emulated   plain torch; backward computes it again, so that no values of weights are kept
=====================  ====================================================================================

Weights with clones behind them are there in forward (``here``) until it is done. Whatever runs in backward
asks for them again (:class:`~fsdmoe.kernels.cloned_products.ClonesHere`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fsdmoe.core.capturing import compute_again
from fsdmoe.kernels.cloned_products import ClonedProducts, ClonesHere
from fsdmoe.kernels.expert_autograd import compute_experts
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized_cloned
from fsdmoe.kernels.expert_mlp import compute_by, fp8_kernels_for, fused_for, refuse_unless_emulated
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertPolicy, ExpertWeights, LowRankUpdates, Rows


def experts_mlp_cloned(
    joined: ExpertWeights,
    clones: ClonesHere,
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy,
    max_rows: int | None,
    updates: LowRankUpdates,
) -> Tensor:
    """A layer's own ``weights`` with clones behind them: ``joined``. Biases are taken from there."""
    assert updates == NO_UPDATES
    assert policy.products is None, "clones take no other library's products of experts"
    own = ExpertWeights(weights.gate_up_E2ND, weights.down_EDN, joined.gate_up_bias, joined.down_bias)
    here = [joined.gate_up_E2ND, joined.down_EDN]
    rows = Rows(*(each.contiguous() for each in rows))
    if policy.recipe is None:
        fused = fused_for(rows, policy, lambda fused: fused.supports(rows.x_RD, *here, policy.activation))
        around = functools.partial(ClonedProducts, clones=clones, forward=here)
        return compute_by(fused, rows, own, policy, max_rows, around=around)
    fused = fp8_kernels_for(rows, joined, policy)
    if fused is None:
        refuse_unless_emulated(rows, joined, policy)
        compute = functools.partial(_emulated, clones, here)
    else:
        compute = functools.partial(_in_fp8, fused, clones, here)
    if torch.is_grad_enabled() and (fused is None or policy.recompute):
        y_RD: Tensor = compute_again(compute, rows, own, policy, max_rows)
    else:
        y_RD = compute(rows, own, policy, max_rows)
    here.clear()
    return y_RD


def _in_fp8(
    fused: Any,
    clones: ClonesHere,
    here: list[Tensor],
    rows: Rows,
    own: ExpertWeights,
    policy: ExpertPolicy,
    max_rows: int | None,
) -> Tensor:
    joined = here or [*clones.joined_again()]
    products = fused.fp8_products(own, joined, policy, max_rows)
    return compute_experts(ClonedProducts(products, clones, [*joined]), rows, own, keeps_x=products.keeps_x)


def _emulated(
    clones: ClonesHere,
    here: list[Tensor],
    rows: Rows,
    own: ExpertWeights,
    policy: ExpertPolicy,
    _max_rows: int | None,
) -> Tensor:
    if here:
        return experts_mlp_quantized_cloned(rows, own, here, clones, policy)
    joined = clones.joined_again()
    try:  # computing again may be stopped early
        return experts_mlp_quantized_cloned(rows, own, joined, clones, policy)
    finally:
        clones.used()
