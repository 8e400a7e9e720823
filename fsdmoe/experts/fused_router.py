"""Token-choice routing through the fused kernel: choice, weights, loads and balance sums in one pass.

What the kernel does not support (expert choice, replay, sequences that are not equally long rows, more
experts than registers hold) is left to the plain path, which is also the definition.

Legend: T tokens, E experts, K choices a token, S sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.scores import Scored
from fsdmoe.kernels.backend import triton_for


class FusedRouting(NamedTuple):
    ids_TK: Tensor
    scored: Scored
    load_SE: Tensor


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
    return FusedRouting(routed.ids, Scored(routed.weights, routed.prob_sum, routed.z_sum), routed.load)


def can_route_fused(x: Tensor, spec: RouterSpec) -> bool:
    """Whether logits of tokens like ``x`` would go through the kernel."""
    return _kernel_for(x, spec) is not None


def _kernel_for(x: Tensor, spec: RouterSpec) -> Any:
    fused = triton_for(x)
    return fused if fused is not None and fused.supports_router(spec.num_experts, spec) else None
