"""The experts' compute: grouped gated MLPs over rows that may each go to several experts.

For each row ``r`` and each of its assignments ``k`` with expert ``e = ids[r, k] >= 0`` and weight ``p``::

    z = W1_e x_r + b1_e        h = φ(z)        y_r += W2_e (p h) + p b2_e         (summed over k in fp32)

``weight_after=True`` computes ``p (W2_e h + b2_e)`` instead: the same value, rounded elsewhere. An id of -1
means "not on this rank": it contributes nothing and its weight gets a zero gradient. Where a weight has a
low-rank update (LoRA), ``W`` stands for ``W + B A``.

``expert_function`` chooses what computes by a policy, when a layer is given its policy:

=========================  ==================================================================================
``fsdmoe.kernels.gluon``   products in fp8 by a recipe, on Hopper; where it says it supports the shapes, and
                           with updates of frozen weights
``experts_mlp_quantized``  products quantised by any recipe, emulated (``expert_emulated.py``)
``experts_mlp_by_library`` grouped products of torchao or Transformer Engine (``precision.backend``)
``fsdmoe.kernels.triton``  CUDA bf16, where it says it supports the shapes
``GroupedProducts``        grouped matrix products of plain torch, any device and dtype (its own file)
``DecodedProducts``        either of these two, over values of frozen weights that are kept as codes
``experts_mlp_reference``  a loop over experts, differentiated by autograd: the definition, and ``sequential``
=========================  ==================================================================================

All but the last, and the emulation in plain torch, are products of one autograd function
(``expert_autograd.py``). Clones of other ranks' experts are computed with a rank's own in one call
(``cloned_experts.py``).

Sizes: R rows, K assignments a row, E experts here, D hidden, N expert width (its share under ETP).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.core.capturing import compute_again
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.activations import activation_of
from fsdmoe.kernels.backend import fp8_for, triton_for
from fsdmoe.kernels.expert_autograd import ExpertProducts, compute_experts
from fsdmoe.kernels.expert_emulated import experts_mlp_quantized
from fsdmoe.kernels.expert_loop import add_bias, loop_over_experts, summed_in
from fsdmoe.kernels.expert_mlp_grouped import GroupedProducts
from fsdmoe.kernels.expert_operands import (
    DEFAULT_POLICY,
    NO_UPDATES,
    ExpertPolicy,
    ExpertWeights,
    LowRankUpdates,
    Rows,
)
from fsdmoe.kernels.frozen_weights import DecodedProducts, frozen_values
from fsdmoe.kernels.library_experts import experts_mlp_by_library
from fsdmoe.kernels.quantized_linear import refuse_other_codes
from fsdmoe.precision.quantized_weight import scales_of

ExpertFunction = Callable[[Rows, ExpertWeights, ExpertPolicy, int | None, LowRankUpdates], Tensor]
"""``function(rows, weights, policy, max_rows, updates)`` computes ``y_RD``; see the module's text. It never
waits for the device, unless it is ``sequential``. ``max_rows`` promises that at most so many ids are >= 0;
buffers are sized by it instead of by R*K."""


def expert_function(policy: ExpertPolicy) -> ExpertFunction:
    """What computes experts by ``policy``, for whoever holds the policy to keep."""
    activation_of(policy.activation)
    function: ExpertFunction = _experts_mlp_fused
    if policy.sequential:
        function = experts_mlp_reference
    elif policy.recipe is not None:
        function = _experts_mlp_recipe if policy.products is None else experts_mlp_by_library
    elif policy.coded:
        return _experts_mlp_coded
    if policy.recompute and function is not _experts_mlp_fused:
        return functools.partial(_made_again, function)
    return function


def experts_mlp(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy = DEFAULT_POLICY,
    max_rows: int | None = None,
    updates: LowRankUpdates = NO_UPDATES,
) -> Tensor:
    """``expert_function`` and its call in one, for a caller without a layer."""
    return expert_function(policy)(rows, weights, policy, max_rows, updates)


def _made_again(function: ExpertFunction, *args: Any) -> Tensor:
    """These keep more than one pre-activation, in places of their own: all of it is computed again."""
    return compute_again(function, *args) if torch.is_grad_enabled() else function(*args)


def _experts_mlp_fused(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None, updates: LowRankUpdates
) -> Tensor:
    """One kernel a projection where there is one for these experts, else grouped products."""

    def takes(fused: Any) -> bool:
        return fused.supports(rows.x_RD, weights.gate_up_E2ND, weights.down_EDN, policy.activation)

    fused = fused_for(rows, policy, takes, updates)
    return compute_by(fused, rows, weights, policy, max_rows, updates)


def _experts_mlp_coded(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None, updates: LowRankUpdates
) -> Tensor:
    """``_experts_mlp_fused`` over weights that are kept as codes: the same products, of decoded values."""
    gate_up_scales = scales_of(weights.gate_up_E2ND)
    down_scales = scales_of(weights.down_EDN)
    shape = weights.down_EDN.shape if down_scales is None else down_scales.shape_of(weights.down_EDN)

    def takes(fused: Any) -> bool:
        return fused.supports_shape(rows.x_RD, shape, policy.activation)

    def decoded(products: ExpertProducts) -> ExpertProducts:
        return DecodedProducts(products, gate_up_scales, down_scales)

    fused = fused_for(rows, policy, takes, updates)
    return compute_by(fused, rows, weights, policy, max_rows, updates, around=decoded)


def fused_for(
    rows: Rows, policy: ExpertPolicy, takes: Callable[[Any], bool], updates: LowRankUpdates = NO_UPDATES
) -> Any:
    """The package :mod:`fsdmoe.kernels.triton` where its kernels take these experts, as ``takes`` asks it;
    else None."""
    fused = None if policy.weight_after else triton_for(rows.x_RD)
    if fused is None or not takes(fused):
        return None
    has_updates = updates.gate_up_a is not None or updates.down_a is not None
    return fused if not has_updates or fused.supports_updates(updates) else None


def compute_by(
    fused: Any,
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy,
    max_rows: int | None,
    updates: LowRankUpdates = NO_UPDATES,
    *,
    around: Callable[[ExpertProducts], ExpertProducts] = lambda products: products,
) -> Tensor:
    """Experts in the precision of their weights, by ``fused`` or by grouped products; ``around`` puts others
    around them."""
    products: ExpertProducts = GroupedProducts(policy, max_rows)
    down_bias = None
    if fused is not None:
        products = fused.FusedProducts.of(policy, max_rows)
        down_bias = weights.down_bias
        gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias.contiguous()
        weights = weights._replace(gate_up_bias=gate_up_bias, down_bias=None)
        rows = Rows(*(each.contiguous() for each in rows))
    late = policy.late if updates.gate_up_a is None and updates.down_a is None else None
    keeps_x = not policy.keeps_rows
    y_RD = compute_experts(around(products), rows, weights, updates, late, keeps_x=keeps_x)
    return y_RD if down_bias is None else _add_weighted_bias(y_RD, rows, down_bias)


def _add_weighted_bias(y_RD: Tensor, rows: Rows, bias_ED: Tensor) -> Tensor:
    """``y_r + Σ_k p b2_e``: one product of every row's weights, spread over the experts, with all biases."""
    is_here_RK = rows.ids_RK >= 0
    spread_RE = rows.weights_RK.new_zeros(len(rows.ids_RK), len(bias_ED)).scatter_add(
        1, rows.ids_RK.clamp_min(0).long(), rows.weights_RK.masked_fill(~is_here_RK, 0.0)
    )
    return torch.addmm(y_RD, spread_RE.to(bias_ED.dtype), bias_ED)


def _experts_mlp_recipe(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, max_rows: int | None, updates: LowRankUpdates
) -> Tensor:
    recipe = policy.recipe
    assert recipe is not None
    fused = fp8_kernels_for(rows, weights, policy)
    if fused is not None:
        if updates.gate_up_a is None and updates.down_a is None:
            return fused.experts_mlp_fp8(rows, weights, policy, max_rows)
        if fused.supports_fp8_updates(weights, updates):
            return fused.experts_mlp_fp8_low_rank(rows, weights, recipe, max_rows, updates)
    refuse_unless_emulated(rows, weights, policy)
    return experts_mlp_quantized(rows, weights, policy, recipe, updates)


def fp8_kernels_for(rows: Rows, weights: ExpertWeights, policy: ExpertPolicy) -> Any:
    """The package :mod:`fsdmoe.kernels.gluon` where its kernels take these experts by the policy's recipe,
    updates apart; else None."""
    recipe = policy.recipe
    assert recipe is not None
    gate_up_E2ND, down_EDN, *biases = weights
    refuse_other_codes(gate_up_E2ND, recipe)
    refuse_other_codes(down_EDN, recipe)
    is_plain = not policy.weight_after and all(bias is None for bias in biases)
    fused = fp8_for(rows.x_RD) if is_plain else None
    given = recipe, rows.x_RD, gate_up_E2ND, down_EDN, policy.activation
    return fused if fused is not None and fused.supports_fp8(*given) else None


def refuse_unless_emulated(rows: Rows, weights: ExpertWeights, policy: ExpertPolicy) -> None:
    """Where no kernels take these experts."""
    if policy.emulate:
        return
    assert policy.recipe is not None
    raise ConfigError(
        f"precision.recipe: expected experts that kernels of {policy.recipe.name} take (bfloat16 on Hopper, "
        "hidden size and expert width multiples of 128, swiglu, no biases, routing weights before the "
        "second projection, adapters up to rank 128 on frozen weights), got "
        f"{rows.x_RD.dtype}, down projections {tuple(weights.down_EDN.shape)}, "
        f"{policy.activation}; set precision.emulate = true to compute it in plain torch (slowly), or "
        "keep the experts out of precision.covers"
    )


def experts_mlp_reference(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy = DEFAULT_POLICY,
    max_rows: int | None = None,
    updates: LowRankUpdates = NO_UPDATES,
) -> Tensor:
    """The definition: one expert after the other, autograd's own backward."""
    gate_up_E2ND, down_EDN, *_ = weights
    if policy.coded:
        gate_up_E2ND = frozen_values(gate_up_E2ND, scales_of(gate_up_E2ND), rows.x_RD.dtype)
        down_EDN = frozen_values(down_EDN, scales_of(down_EDN), rows.x_RD.dtype)
    gate_up_E2ND = _updated(gate_up_E2ND, updates.gate_up_a, updates.gate_up_b)
    down_EDN = _updated(down_EDN, updates.down_a, updates.down_b)

    def first(expert: int, x: Tensor) -> Tensor:
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
        return F.linear(x, gate_up_E2ND[expert], bias)

    def second(expert: int, h: Tensor, weight: Tensor | None) -> Tensor:
        y = F.linear(h, down_EDN[expert]).to(summed_in(h))
        return add_bias(y, weights.down_bias, expert, weight)

    return loop_over_experts(rows, len(gate_up_E2ND), policy, first, second)


def _updated(weight_EOI: Tensor, a_EQI: Tensor | None, b_EOQ: Tensor | None) -> Tensor:
    return weight_EOI if a_EQI is None or b_EOQ is None else weight_EOI + b_EOQ @ a_EQI
