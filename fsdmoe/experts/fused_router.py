"""Token-choice routing through the fused kernel: choice, weights, loads and balance sums in one pass.

What the kernel does not support (expert choice, replay, sequences that are not equally long rows, more
experts than registers hold) is left to the plain path, which is also the definition.

Legend: T tokens, E experts, K choices a token, S sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.experts.config import BalanceConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.scores import Scored
from fsdmoe.kernels.backend import triton_for


class FusedRouting(NamedTuple):
    ids_TK: Tensor
    scored: Scored
    load_SE: Tensor
    sums: Tensor
    """What balance terms are made of: see :mod:`fsdmoe.kernels.triton.balance_kernel`."""


def route_fused(
    logits_TE: Tensor,
    correction_bias_E: Tensor | None,
    spec: RouterSpec,
    context: RoutingContext,
    num_sequences: int,
) -> FusedRouting | None:
    """The decision of ``spec`` with its sums over sequences, or None where the plain path must decide."""
    if num_sequences > 1 and not context.equal_sequences:
        return None
    fused = _kernel_for(logits_TE, spec)
    if fused is None:
        return None
    routed = fused.router_topk_triton(
        logits_TE, correction_bias_E, spec, num_segments=num_sequences, token_mask_T=context.token_mask_T
    )
    scored = Scored(routed.weights, routed.prob_sum, routed.z_sum)
    return FusedRouting(routed.ids, scored, routed.load, routed.sums)


def balance_fused(
    sums: Tensor, config: BalanceConfig, context: RoutingContext
) -> tuple[Tensor, Tensor] | None:
    """The loss of :func:`fsdmoe.experts.balance.balance_loss` and ``load_E`` in one kernel. None where a term
    counts choices of other ranks, micro-batches or devices, or there is none."""
    group = context.sequence_group
    counts_others = config.global_batch or config.device or (group is not None and group.size() > 1)
    if counts_others or not (config.sequence or config.micro_batch or config.z_loss):
        return None
    number = context.num_global_tokens
    assert number is not None
    if isinstance(number, Tensor):
        number = number.to(device=sums.device, dtype=torch.float32)
    fused = triton_for(sums)
    factors = fused.BalanceFactors(float(config.sequence), float(config.micro_batch), float(config.z_loss))
    return fused.balance_triton(sums, number if isinstance(number, Tensor) else float(number), factors)


def can_route_fused(x: Tensor, spec: RouterSpec) -> bool:
    """Whether logits of tokens like ``x`` would go through the kernel."""
    return _kernel_for(x, spec) is not None


def _kernel_for(x: Tensor, spec: RouterSpec) -> Any:
    fused = triton_for(x)
    return fused if fused is not None and fused.supports_router(spec.num_experts, spec) else None
