"""Biases of routers that share tokens evenly among experts, as after a long time of balancing.

Random weights route most tokens of a layer to a few experts. Here each router of one forward gets, before it
chooses, a bias that evens out its own choices: first so that every expert is above its threshold for an equal
share of tokens, then step by step by how far its load is off. Layers follow one another, so each sees the
input that it will have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fsdmoe.experts.balance import count_choices
from fsdmoe.experts.router import Router, select_top_k
from fsdmoe.experts.scores import choice_scores

ITERATIONS, DECAY = 60, 0.93


@torch.no_grad()
def even_bias(router: Router, x_TD: torch.Tensor) -> torch.Tensor:
    """``[E]``, for these tokens."""
    spec, num_tokens = router.spec, len(x_TD)
    scores_TE = choice_scores(F.linear(x_TD.float(), router.weight.float()), spec.score)
    rank = num_tokens - 1 - num_tokens * spec.top_k // spec.num_experts
    threshold_E = scores_TE.sort(0).values[max(rank, 0)]
    bias_E, step_E = threshold_E.max() - threshold_E, scores_TE.std(0)
    for _ in range(ITERATIONS):
        load_E = count_choices(select_top_k(scores_TE, spec, bias_E), spec.num_experts)[0]
        bias_E = bias_E + step_E * (2 - 2 * load_E / load_E.mean()).clamp(-1, 1)
        step_E = step_E * DECAY
    return bias_E


@contextlib.contextmanager
def evening(routers: list[Router]) -> Iterator[None]:
    """A forward in this block evens out all of them."""

    def even(router: Router, args: tuple[Any, ...]) -> None:
        assert router.e_score_correction_bias is not None  # every router has one, bias_rate being set
        router.e_score_correction_bias.copy_(even_bias(router, args[0].flatten(0, -2)))

    handles = [router.register_forward_pre_hook(even) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
