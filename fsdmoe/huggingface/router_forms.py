"""Routers of wrapped models that choose as ours do, recognised by trying them, through the fused kernel.

A router is a module with a ``weight [E, D]``, perhaps a ``bias [E]`` of its logits or a buffer ``[E]`` that
moves the choice, that returns logits, weights and expert ids in some order. Its logits stay what they are,
rounding included, so that it chooses the experts that it would choose; scores, choice and weights follow from
them in one kernel instead of a dozen. Where the kernel does not run, and while recorded choices are replayed,
the router's own forward does.

Legend: T tokens, D hidden width, E experts, K choices a token.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.fused_router import can_route_fused, route_fused
from fsdmoe.experts.router import select_top_k
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.scores import ScoreRule, choice_scores, router_logits, score_choices
from fsdmoe.huggingface.replay import replays_choices
from fsdmoe.kernels.linear import project
from fsdmoe.kernels.router_policy import ScoreName

_GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
_NUM_TRIED = 32  # tokens
_OF_ALL_MODULES = frozenset(vars(nn.Module()))  # parameters, hooks and the like


@dataclass(frozen=True)
class RouterForm:
    """What a router computes, and what it returns."""

    spec: RouterSpec
    order: tuple[int, int, int]
    """Where logits, weights and ids are in what it returns."""
    correction: str | None
    """Name of the buffer that moves the choice."""
    wide_product: bool
    """Logits are computed in fp32, from weights and rows of any precision; else in that precision."""
    wide_logits: bool
    """Logits are returned in fp32."""
    wide_weights: bool
    """Weights are in fp32, and not in the precision of x."""
    flattens: bool
    """Rows ``[.., D]`` are taken, and come back as tokens."""

    @property
    def product(self) -> Callable[..., Tensor]:
        """Of rows, weight and bias: the logits, rounded as the router rounds them."""
        return router_logits if self.wide_product else project

    def returned(
        self, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """What the router returns for rows of ``dtype``."""
        found = _Returned(
            logits_TE.float() if self.wide_logits else logits_TE,
            weights_TK if self.wide_weights else weights_TK.to(dtype),
            ids_TK,
        )
        places = dict(zip(self.order, found, strict=True))
        return tuple(places[place] for place in range(3))


class _Returned(NamedTuple):
    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


def is_router_like(module: nn.Module) -> bool:
    """A weight ``[E, D]``, perhaps a bias and a buffer ``[E]``, and nothing else."""
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear) or not {"weight"} <= own.keys() <= {"weight", "bias"}:
        return False
    if any(True for _ in module.children()) or own["weight"].dim() != 2:
        return False
    vectors = [*(own[name] for name in own.keys() - {"weight"}), *module.buffers()]
    return len(list(module.buffers())) <= 1 and all(v.shape == own["weight"].shape[:1] for v in vectors)


class Trials:
    """Calls trials of modules once for all modules of the same class, settings and shapes."""

    def __init__(self) -> None:
        self._tried: dict[Any, Any] = {}

    def __call__(self, trial: Callable[..., Any], module: nn.Module, *args: Any) -> Any:
        """The trial's result, remembered."""
        settings = tuple((k, _compared(v)) for k, v in vars(module).items() if k not in _OF_ALL_MODULES)
        shapes = tuple(tuple(p.shape) for p in module.parameters(recurse=False))
        key = trial, type(module), settings, shapes
        if key not in self._tried:
            self._tried[key] = trial(module, *args)
        return self._tried[key]


def _compared(setting: Any) -> Any:
    """A setting by its value where that is plain, else by its identity: another function is another class."""
    return setting if isinstance(setting, (bool, int, float, str, tuple)) else id(setting)


def router_form(module: nn.Module) -> RouterForm | None:
    """The form of a router, found by trying; None for another, or for one that draws noise in training."""
    form = _form(module, trains=False)
    return form if form is not None and form == _form(module, trains=True) else None


@torch.no_grad()
def _form(module: nn.Module, *, trains: bool) -> RouterForm | None:
    twin = _Twin(module, trains=trains)
    found = twin.run(torch.float32)
    order = None if found is None else _order(found, twin.num_experts)
    rounded = twin.run(torch.bfloat16)
    if found is None or order is None or rounded is None:
        return None
    theirs, narrow = (_Returned(*(each[place] for place in order)) for each in (found, rounded))
    if not torch.allclose(theirs.logits_TE, twin.logits(torch.float32), 1e-4, 1e-4):
        return None
    spec = next((s for s in _specs(module, twin, theirs) if _chooses(s, twin, theirs)), None)
    wide_product = not torch.equal(narrow.logits_TE.float(), twin.logits(torch.bfloat16).float())
    # Neither in one precision nor in the other, its logits would choose other experts than ours.
    if spec is None or (
        wide_product and not torch.allclose(narrow.logits_TE, twin.wide_logits(), 1e-4, 1e-4)
    ):
        return None
    return RouterForm(
        spec,
        order,
        correction=twin.correction,
        wide_product=wide_product,
        wide_logits=narrow.logits_TE.dtype == torch.float32,
        wide_weights=narrow.weights_TK.dtype == torch.float32,
        flattens=twin.flattens(),
    )


class _Twin:
    """A router with other parameters, to be tried."""

    def __init__(self, module: nn.Module, *, trains: bool) -> None:
        self._module = module
        self._trains = trains
        random = torch.Generator().manual_seed(0)
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
        self.num_experts, width = shapes["weight"]
        self._values = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
        self._values["weight"] /= width**0.5
        self._x_TD = torch.randn(_NUM_TRIED, width, generator=random)
        self.correction = next((name for name, _ in module.named_buffers()), None)
        self.correction_E = 0.3 * torch.randn(self.num_experts, generator=random) if self.correction else None

    def run(self, dtype: torch.dtype, shape: tuple[int, ...] = (_NUM_TRIED,)) -> tuple[Tensor, ...] | None:
        """What the module's own forward returns, if that is three tensors for as many tokens."""
        twin = copy.copy(self._module)
        values = {name: nn.Parameter(value.to(dtype)) for name, value in self._values.items()}
        buffers = {} if self.correction is None else {self.correction: self.correction_E}
        twin.__dict__.update(_parameters=values, _buffers=buffers, training=self._trains)
        try:
            found = type(twin).forward(twin, self._x_TD.to(dtype).view(*shape, -1))
        except Exception:  # an unknown forward, given inputs it may not expect: any failure means "not known"
            return None
        if not (isinstance(found, tuple) and len(found) == 3 and all(isinstance(t, Tensor) for t in found)):
            return None
        return found if all(t.dim() == 2 and len(t) == _NUM_TRIED for t in found) else None

    def flattens(self) -> bool:
        return self.run(torch.float32, (2, _NUM_TRIED // 2)) is not None

    def logits(self, dtype: torch.dtype) -> Tensor:
        values = {name: value.to(dtype) for name, value in self._values.items()}
        return F.linear(self._x_TD.to(dtype), **values)

    def wide_logits(self) -> Tensor:
        """In fp32, of what is left of all values in bf16."""
        values = {name: value.bfloat16().float() for name, value in self._values.items()}
        return F.linear(self._x_TD.bfloat16().float(), **values)


def _order(found: tuple[Tensor, ...], num_experts: int) -> tuple[int, int, int] | None:
    """Where logits, weights and ids are, by dtype and width; None where these do not tell."""
    ids = [place for place, t in enumerate(found) if not t.is_floating_point()]
    logits = [p for p, t in enumerate(found) if t.is_floating_point() and t.shape[1] == num_experts]
    if len(ids) != 1 or len(logits) != 1:
        return None
    weights = ({0, 1, 2} - {ids[0], logits[0]}).pop()
    return (logits[0], weights, ids[0]) if found[weights].shape == found[ids[0]].shape else None


def _specs(module: Any, twin: _Twin, theirs: _Returned) -> Iterator[RouterSpec]:
    """All that it could be, by what it returned and by its attributes."""
    groups = {(getattr(module, n, None) or 1, getattr(module, k, None) or 1) for n, k in _GROUPS} | {(1, 1)}
    factors = {1.0} | {v for k, v in vars(module).items() if "scal" in k and isinstance(v, (int, float))}
    top_k = theirs.ids_TK.shape[1]
    for score, norm_topk, scaling, (num_groups, topk_groups), group_score in itertools.product(
        get_args(ScoreName), (True, False), sorted(factors), sorted(groups), ("top2_sum", "max")
    ):
        try:
            yield RouterSpec(
                num_experts=twin.num_experts, top_k=top_k, score=score, norm_topk=norm_topk,
                scaling=float(scaling), num_groups=num_groups, topk_groups=topk_groups,
                group_score=group_score,
            )  # fmt: skip
        except ConfigError:  # attributes that mean something else
            continue


def _chooses(spec: RouterSpec, twin: _Twin, theirs: _Returned) -> bool:
    """Whether ``spec`` gives the same experts the same weights; the order of a token's experts is free."""
    rule = ScoreRule(spec.score, spec.norm_topk, spec.scaling, complete=True)
    scores_TE = choice_scores(theirs.logits_TE, spec.score)
    ids_TK = select_top_k(scores_TE, spec, twin.correction_E)
    weights_TK = score_choices(theirs.logits_TE, ids_TK, rule, scores_TE=scores_TE).weights_TK
    ours_TE, theirs_TE = (
        torch.zeros_like(scores_TE).scatter(1, ids, weights)
        for ids, weights in ((ids_TK, weights_TK), (theirs.ids_TK, theirs.weights_TK))
    )
    same = torch.equal(ids_TK.sort().values, theirs.ids_TK.sort().values)
    return same and torch.allclose(ours_TE, theirs_TE, 1e-4, 1e-5)


@functools.cache
def router_forward(form: RouterForm) -> Callable[..., Any]:
    """A forward for all routers of one form."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = _route(self, args[0], form) if len(args) == 1 and not kwargs else None
        return type(self).forward(self, *args, **kwargs) if returned is None else returned

    return forward


def _route(router: Any, x: Any, form: RouterForm) -> tuple[Tensor, ...] | None:
    """By the fused kernel; None where the router must decide."""
    is_known = type(x) is Tensor and (x.dim() == 2 or form.flattens) and x.dtype == router.weight.dtype
    if not is_known or not _may_route(x, form.spec):
        return None
    x_TD, bias_E = x.reshape(-1, x.shape[-1]), router._parameters.get("bias")
    logits_TE = form.product(x_TD, router.weight, bias_E)
    correction_E = None if form.correction is None else getattr(router, form.correction)
    routed = route_fused(logits_TE, correction_E, form.spec, RoutingContext(), 1)
    assert routed is not None
    return form.returned(logits_TE, routed.scored.weights_TK, routed.ids_TK, x.dtype)


def _may_route(x: Tensor, spec: RouterSpec) -> bool:
    """A compiler fuses the router's own operations; autocast gives them other dtypes than these."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or replays_choices():
        return False
    return can_route_fused(x, spec)
