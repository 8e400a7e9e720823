"""Biases of routers that share tokens evenly among experts, as after a long time of balancing; or otherwise.

Random weights route most tokens of a layer to a few experts. Here each router of one forward gets, before it
chooses, a bias that brings about its share of tokens for each expert, an even one if none is given: first so
that every expert is above its threshold for that share of tokens, then step by step by how far its load is
off. Layers follow one another, so each sees the input that it will have."""

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
def bias_for(router: Router, x_TD: torch.Tensor, loads_E: torch.Tensor) -> torch.Tensor:
    """``[E]``, for these tokens; ``loads_E`` in any unit."""
    spec = router.spec
    num_tokens = len(x_TD)
    scores_TE = choice_scores(F.linear(x_TD.float(), router.weight.float()), spec.score)
    wanted_E = (loads_E / loads_E.sum() * num_tokens * spec.top_k).to(scores_TE)
    rank_1E = (num_tokens - 1 - wanted_E).long().clamp(min=0).unsqueeze(0)
    threshold_E = scores_TE.sort(0).values.gather(0, rank_1E)[0]
    bias_E = threshold_E.max() - threshold_E
    step_E = scores_TE.std(0)
    for _ in range(ITERATIONS):
        load_E = count_choices(select_top_k(scores_TE, spec, bias_E), spec.num_experts)[0]
        bias_E = bias_E + step_E * (2 - 2 * load_E / wanted_E.clamp(min=1)).clamp(-1, 1)
        step_E = step_E * DECAY
    return bias_E


@contextlib.contextmanager
def routed_by(routers: list[Router], loads_LE: torch.Tensor) -> Iterator[None]:
    """A forward in this block gives each of them the bias for its ``loads_LE``."""
    loads_by_router = dict(zip(routers, loads_LE, strict=True))

    def fit(router: Router, args: tuple[Any, ...]) -> None:
        assert router.e_score_correction_bias is not None  # every router has one, bias_rate being set
        found_E = bias_for(router, args[0].flatten(0, -2), loads_by_router[router])
        router.e_score_correction_bias.copy_(found_E)

    handles = [router.register_forward_pre_hook(fit) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
