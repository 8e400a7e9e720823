"""Routers of wrapped models that choose as ours do, recognised by trying them, through the fused kernel.

A router is a module with a ``weight [E, D]``, perhaps a ``bias [E]``, that returns logits, weights and expert
ids in some order. Its logits stay what they are, rounding included, so that it chooses the experts that it
would choose; scores, choice and weights follow from them in one kernel instead of a dozen. Where the kernel
does not run, and while recorded choices are replayed, the router's own forward does.

Legend: T tokens, D hidden width, E experts, K choices a token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.experts.context import ScoreName
from fsdmoe.experts.scores import ScoreRule, choice_scores, score_choices
from fsdmoe.huggingface.replay import replays_choices
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.linear import project


@dataclass(frozen=True)
class RouterForm:
    """What a router computes from its logits, and what it returns."""

    score: ScoreName
    normalise: bool
    top_k: int
    order: tuple[int, int, int]
    """Where logits, weights and ids are in what it returns."""
    wide_logits: bool
    """Logits are returned in fp32, though they are computed in the precision of x."""
    wide_weights: bool
    """Weights are in fp32, and not in the precision of x."""


def is_router_like(module: nn.Module) -> bool:
    """A weight ``[E, D]``, perhaps a bias ``[E]``, and nothing else."""
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear) or not {"weight"} <= own.keys() <= {"weight", "bias"}:
        return False
    has_more = any(True for _ in module.children()) or any(True for _ in module.buffers())
    bias = own.get("bias")
    return (
        not has_more
        and own["weight"].dim() == 2
        and (bias is None or tuple(bias.shape) == tuple(own["weight"].shape[:1]))
    )


@torch.no_grad()
def router_form(module: nn.Module) -> RouterForm | None:
    """The form of a router, found by trying; None for another."""
    random = torch.Generator().manual_seed(0)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    values = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    x_TD = torch.randn(6, shapes["weight"][1], generator=random)
    found = _returned(module, values, x_TD)
    order = None if found is None else _order(found, num_experts=shapes["weight"][0])
    if found is None or order is None:
        return None
    logits_TE, weights_TK, ids_TK = (found[place] for place in order)
    narrow = {name: value.bfloat16() for name, value in values.items()}
    rounded = _returned(module, narrow, x_TD.bfloat16())
    if rounded is None or not torch.allclose(logits_TE, F.linear(x_TD, **values), 1e-4, 1e-4):
        return None
    # Logits that are computed in fp32 from narrow weights would choose other experts than ours.
    if not torch.equal(rounded[order[0]].float(), F.linear(x_TD.bfloat16(), **narrow).float()):
        return None
    wide_logits, wide_weights = (rounded[place].dtype == torch.float32 for place in order[:2])
    rules: list[tuple[ScoreName, bool]] = [
        ("softmax_topk", True), ("softmax_topk", False), ("topk_softmax", True),
    ]  # fmt: skip
    for score, normalise in rules:
        form = RouterForm(score, normalise, ids_TK.shape[1], order, wide_logits, wide_weights)
        if _chooses(form, logits_TE, weights_TK, ids_TK):
            return form
    return None


def _returned(module: nn.Module, values: dict[str, Tensor], x_TD: Tensor) -> tuple[Tensor, ...] | None:
    """What the module's own forward gives with these parameters, if that is three tensors."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in values.items()}
    try:
        found = type(module).forward(twin, x_TD)
    except Exception:  # an unknown forward, given inputs it may not expect: any failure means "not known"
        return None
    if not (isinstance(found, tuple) and len(found) == 3):
        return None
    return found if all(isinstance(t, Tensor) and t.dim() == 2 for t in found) else None


def _order(found: tuple[Tensor, ...], num_experts: int) -> tuple[int, int, int] | None:
    """Where logits, weights and ids are, by dtype and width; None where these do not tell."""
    ids = [place for place, t in enumerate(found) if not t.is_floating_point()]
    logits = [p for p, t in enumerate(found) if t.is_floating_point() and t.shape[1] == num_experts]
    if len(ids) != 1 or len(logits) != 1:
        return None
    weights = ({0, 1, 2} - {ids[0], logits[0]}).pop()
    return (logits[0], weights, ids[0]) if found[weights].shape == found[ids[0]].shape else None


def _chooses(form: RouterForm, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> bool:
    rule = ScoreRule(form.score, form.normalise, scaling=1.0, complete=True)
    scores_TE = choice_scores(logits_TE, form.score)
    chosen = scores_TE.topk(form.top_k, dim=-1).indices
    ours_TK = score_choices(logits_TE, ids_TK, rule, scores_TE=scores_TE).weights_TK
    return torch.equal(chosen, ids_TK) and torch.allclose(ours_TK, weights_TK, 1e-4, 1e-5)


@functools.cache
def router_forward(form: RouterForm) -> Callable[..., Any]:
    """A forward for all routers of one form."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x_TD = args[0] if len(args) == 1 and not kwargs else None
        fused = None if x_TD is None else _kernel_for(self, x_TD, form)
        if x_TD is None or fused is None:
            return type(self).forward(self, *args, **kwargs)
        logits_TE = project(x_TD, self.weight, self._parameters.get("bias"))
        routed = fused.router_topk_triton(logits_TE, None, _policy(fused, form))
        weights_TK = routed.weights if form.wide_weights else routed.weights.to(x_TD.dtype)
        returned = logits_TE.float() if form.wide_logits else logits_TE, weights_TK, routed.ids
        places = dict(zip(form.order, returned, strict=True))
        return tuple(places[place] for place in range(len(places)))

    return forward


def _kernel_for(router: Any, x_TD: Any, form: RouterForm) -> Any:
    if type(x_TD) is not Tensor or x_TD.dim() != 2 or x_TD.dtype != router.weight.dtype or replays_choices():
        return None
    if torch.is_autocast_enabled(x_TD.device.type):
        return None
    fused = triton_for(x_TD)
    supported = fused is not None and fused.supports_router(router.weight.shape[0], _policy(fused, form))
    return fused if supported else None


def _policy(fused: Any, form: RouterForm) -> Any:
    return fused.TopKPolicy(top_k=form.top_k, score=form.score, normalise=form.normalise)
