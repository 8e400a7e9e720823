"""The router as custom operators, for ``torch.compile``; a policy is passed as its fields."""

from __future__ import annotations

from typing import Any, Optional

import torch

from fsdmoe.kernels.triton.router_kernels import route, route_backward
from fsdmoe.kernels.triton.router_policy import TopKPolicy


def _policy(*fields: Any) -> TopKPolicy:
    return TopKPolicy(**dict(zip(TopKPolicy.__dataclass_fields__, fields, strict=True)))


@torch.library.custom_op("fsdmoe::router_topk", mutates_args=())
def _forward_op(
    logits_TE: torch.Tensor,
    bias_E: Optional[torch.Tensor],  # noqa: UP045 (the schema parser of torch 2.11 knows this spelling)
    token_mask_T: Optional[torch.Tensor],  # noqa: UP045
    num_segments: int,
    top_k: int,
    score: str,
    normalise: bool,
    scaling: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    policy = _policy(top_k, score, normalise, scaling, num_groups, topk_groups, group_score)
    return route(logits_TE, bias_E, token_mask_T, policy, num_segments)


@_forward_op.register_fake
def _(logits_TE, bias_E, token_mask_T, num_segments, top_k, *policy):
    num_tokens, num_experts = logits_TE.shape
    return (
        logits_TE.new_empty(num_tokens, top_k, dtype=torch.float32),
        logits_TE.new_empty(num_tokens, top_k, dtype=torch.int64),
        logits_TE.new_empty(num_segments, 2 * num_experts + 1, dtype=torch.float32),
    )


@torch.library.custom_op("fsdmoe::router_topk_backward", mutates_args=())
def _backward_op(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    token_mask_T: Optional[torch.Tensor],  # noqa: UP045
    dweights_TK: torch.Tensor,
    dsums: torch.Tensor,
    top_k: int,
    score: str,
    normalise: bool,
    scaling: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> torch.Tensor:
    policy = _policy(top_k, score, normalise, scaling, num_groups, topk_groups, group_score)
    return route_backward(logits_TE, ids_TK, token_mask_T, dweights_TK, dsums, policy)


@_backward_op.register_fake
def _(logits_TE, *others):
    return torch.empty_like(logits_TE)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[2])
    ctx.policy = inputs[4:]


def _backward(
    ctx: Any, dweights_TK: torch.Tensor, _: None, dsums: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    logits_TE, ids_TK, token_mask_T = ctx.saved_tensors
    dlogits_TE = _backward_op(logits_TE, ids_TK, token_mask_T, dweights_TK, dsums, *ctx.policy)
    return (dlogits_TE, *(None,) * 10)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def route_op(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    token_mask_T: torch.Tensor | None,
    policy: TopKPolicy,
    num_segments: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = policy  # field by field: dataclasses.astuple copies, which not every compiler of torch follows
    fields = p.top_k, p.score, p.normalise, p.scaling, p.num_groups, p.topk_groups, p.group_score
    return _forward_op(logits_TE, bias_E, token_mask_T, num_segments, *fields)
