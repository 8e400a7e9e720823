"""Experts whose products are quantised by any recipe.

Kernels round and multiply as plain torch does, where they take these experts (``triton/rounded_mlp.py``).
Else plain torch does, differentiated by autograd.

In plain torch all experts are computed at once, or one after the other where that is cheaper, or where
something counts an expert's own elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsdmoe.core.capturing import compute_again
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.cloned_products import ClonesHere, joined_values
from fsdmoe.kernels.expert_batch import all_experts_at_once, ranges_of
from fsdmoe.kernels.expert_loop import add_bias, loop_over_experts, summed_in
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.quantized_linear import QuantizedLinear, weight_values
from fsdmoe.precision.formats import Recipe
from fsdmoe.precision.operand_state import Watch, watch_of
from fsdmoe.precision.quantized_weight import scales_of


def experts_mlp_quantized(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy,
    recipe: Recipe,
    updates: LowRankUpdates = NO_UPDATES,
) -> Tensor:
    """``experts_mlp``; blocks along tokens start anew with every expert, and updates are not quantised. Plain
    torch waits for the device."""
    watches = tuple(map(watch_of, policy.states))
    if all(scales_of(weight) is None for weight in (weights.gate_up_E2ND, weights.down_EDN)):
        return _experts(rows, weights, policy, recipe, watches, updates)
    return compute_again(
        _experts, rows, weights, policy, recipe, watches, updates
    )  # see ``quantized_linear``


def _experts(
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy,
    recipe: Recipe,
    watches: tuple[Watch, ...],
    updates: LowRankUpdates,
) -> Tensor:
    # Either may be frozen, and then it did not come quantised, or as codes of its own.
    has_updates = updates.gate_up_a is not None or updates.down_a is not None
    fused = None if has_updates else _fused_for(rows, weights, policy, recipe, watches)
    if fused is not None:
        return fused.experts_mlp_rounded(*rows, weights.gate_up_E2ND, weights.down_EDN, recipe)
    values = weight_values(weights.gate_up_E2ND, recipe), weight_values(weights.down_EDN, recipe)
    return _experts_of(values, rows, weights, policy, watches, updates)


def experts_mlp_quantized_cloned(
    rows: Rows,
    own: ExpertWeights,
    joined: Sequence[Tensor],
    clones: ClonesHere,
    policy: ExpertPolicy,
) -> Tensor:
    """The same of a rank's ``own`` weights with clones behind them, whose biases have these already."""
    recipe = policy.recipe
    assert recipe is not None
    first, second = [
        (
            joined_values(weight, both, clones, number),
            recipe if scales_of(both) is None else recipe.with_weights_as_given(),
        )
        for number, (weight, both) in enumerate(zip(own[:2], joined, strict=True))
    ]
    return _experts_of((first, second), rows, own, policy, tuple(map(watch_of, policy.states)), NO_UPDATES)


def _experts_of(
    values: tuple[tuple[Tensor, Recipe], tuple[Tensor, Recipe]],
    rows: Rows,
    weights: ExpertWeights,
    policy: ExpertPolicy,
    watches: tuple[Watch, ...],
    updates: LowRankUpdates,
) -> Tensor:
    """Of the ``values`` of both projections, each with the recipe for it; biases are in ``weights``."""
    (gate_up_E2ND, first_recipe), (down_EDN, second_recipe) = values
    at = None if any(map(_one_by_one, watches)) else ranges_of(rows.ids_RK, len(gate_up_E2ND))
    if at is not None:

        def all_first(x_ECD: Tensor) -> Tensor:
            z_EC2N = QuantizedLinear.apply(x_ECD, gate_up_E2ND, first_recipe, watches[0])
            return _updated(z_EC2N, x_ECD, updates.gate_up_a, updates.gate_up_b)

        def all_second(h_ECN: Tensor) -> Tensor:
            y_ECD = QuantizedLinear.apply(h_ECN, down_EDN, second_recipe, watches[1])
            return _updated(y_ECD, h_ECN, updates.down_a, updates.down_b)

        return all_experts_at_once(rows, at, weights, policy, (all_first, all_second))
    # One gradient of each whole weight, instead of one for every expert.
    gate_ups, downs = gate_up_E2ND.unbind(), down_EDN.unbind()
    num_own = len(weights.down_EDN)
    of_clones = tuple(watch._replace(of_clone=True) for watch in watches)
    of_experts = [watches] * num_own + [of_clones] * (len(gate_ups) - num_own)

    def first(expert: int, x: Tensor) -> Tensor:
        z = QuantizedLinear.apply(x, gate_ups[expert], first_recipe, of_experts[expert][0])
        z = _updated(z, x, *_of_expert(expert, updates.gate_up_a, updates.gate_up_b))
        return add_bias(z, weights.gate_up_bias, expert)

    def second(expert: int, h: Tensor, weight: Tensor | None) -> Tensor:
        y = QuantizedLinear.apply(h, downs[expert], second_recipe, of_experts[expert][1])
        y = _updated(y, h, *_of_expert(expert, updates.down_a, updates.down_b)).to(summed_in(h))
        return add_bias(y, weights.down_bias, expert, weight)

    return loop_over_experts(rows, len(gate_ups), policy, first, second)


def _updated(y: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """``y + B A x``: of one expert, or of all in ranges of their own."""
    return y if a is None or b is None else y + (x @ a.mT) @ b.mT


def _of_expert(expert: int, *factors: Tensor | None) -> list[Tensor | None]:
    return [None if factor is None else factor[expert] for factor in factors]


def _fused_for(
    rows: Rows, weights: ExpertWeights, policy: ExpertPolicy, recipe: Recipe, watches: tuple[Watch, ...]
) -> Any:
    """The package of kernels that round and multiply as plain torch does, where it takes these experts."""
    gate_up_E2ND, down_EDN, *biases = weights
    is_coded = any(scales_of(weight) is not None for weight in (gate_up_E2ND, down_EDN))
    if is_coded or policy.weight_after or any(bias is not None for bias in biases):
        return None
    fused = None if any(map(_one_by_one, watches)) else triton_for(rows.x_RD)
    given = recipe, rows.x_RD, gate_up_E2ND, down_EDN, policy.activation
    return fused if fused is not None and fused.supports_rounded(*given) else None


def _one_by_one(watch: Watch) -> bool:
    """Whether something counts an expert's own elements, without padding."""
    return watch.state is not None and watch.state.collects
