"""Layers of a wrapped model that compute what a layer of our decoders computes, through the same kernels.

================  ========================  ==================================================================
what              recognised by             computed by
================  ========================  ==================================================================
norms             trying the forward        one kernel, over heads and with a gate too (``norm_forms``)
projections       the class ``nn.Linear``   a product whose weight gradient is written where it is reduced
embeddings        ``nn.Embedding``          the same
routers           trying the forward        scores, choice and weights in one kernel (``router_forms``)
rotary positions  trying the function       one kernel (``rotary_forms``)
attention         transformers' own sdpa    cuDNN, without repeated keys and values (``attention_forward``)
================  ========================  ==================================================================

A module that is recognised gets a ``forward`` of its own (``FUSED`` of :mod:`fsdmoe.core.rewrites`), which
all modules of its kind share. Its class, parameters, hooks and place stay. What is not recognised stays
as it is, and is named at the start: norms of another form (with a mean), classes derived from
``nn.Linear``, modules with hooks or with another rewrite that computes or needs their own forward (``tp``, a
fused loss, a recipe), and all of a model that was split before (its modules compute on DTensors).

Modules are tried before sharding, while their parameters are whole, and replaced after it: when the engine
shards an embedding, it decides by the embedding's own forward whether backward needs the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdmoe.core.rewrites import Rewrite, computed_by, rewrite
from fsdmoe.huggingface.attention_forward import attends_by, attention_forward, has_unknown_rotation
from fsdmoe.huggingface.norm_forms import eps_name, norm_form, norm_forward
from fsdmoe.huggingface.router_forms import Trials, is_router_like, router_form, router_forward
from fsdmoe.kernels.linear import embed_tokens
from fsdmoe.models.projections import linear_forward

_ANOTHER_FORM, _OWN_CLASS, _HOOKED = "of another form", "of a class of their own", "with hooks"
_SPLIT_BEFORE = "all of it, because its modules compute on DTensors"

_KINDS = ("norms", "projections", "embeddings", "routers", "rotary positions", "attentions")

Forward = Callable[..., Any]


class Found(NamedTuple):
    """A module that our kernels compute, or one of a kind that they know and that is left as it is."""

    module: nn.Module
    forward: Forward | None
    """None: the module is left as it is."""
    kinds: dict[str, str]
    """Kinds of computation in this module, each with the reason why it is left; '' where it is fused."""


class FusedLayers:
    """What was found in a model; :meth:`apply` replaces it, once."""

    def __init__(self, model: nn.Module, *, skip: Collection[int] = (), split_before: bool = False) -> None:
        """Modules whose id is in ``skip`` are not looked at; with ``split_before`` none is."""
        self._split_before = split_before
        self._try = Trials()
        self.left: dict[nn.Module, str] = (
            dict.fromkeys(model.modules(), _SPLIT_BEFORE) if split_before else {}
        )
        """What was not replaced, and why."""
        modules = () if split_before else [m for m in model.modules() if id(m) not in skip]
        self._found = [found for module in modules for found in self._look_at(module)]

    def apply(self) -> str:
        """Replace what was found, and say what was replaced, what was left, and why."""
        told: Counter[tuple[str, str]] = Counter()
        for module, forward, kinds in self._found:
            if forward is not None and (other := computed_by(module)) is not None:
                module, forward, kinds = _left(module, kinds, f"left to {other}")
            if forward is not None:
                fused = ", ".join(kind for kind, why in kinds.items() if not why)
                rewrite(module, Rewrite.FUSED, forward, says=f"kernels: {fused}")
            told.update(kinds.items())
            if any(kinds.values()):
                self.left[module] = ", ".join(f"{kind} {why}" for kind, why in kinds.items() if why)
        self._found = []
        done = ", ".join(f"{told[kind, '']} {kind}" for kind in _KINDS if told[kind, ""]) or "none"
        kept = [f"{count} {kind} {why}" for (kind, why), count in sorted(told.items()) if why]
        kept = [_SPLIT_BEFORE] if self._split_before else kept
        return done + (f"; left as they are: {', '.join(kept)}" if kept else "")

    def _look_at(self, module: nn.Module) -> Iterator[Found]:
        forward: Forward | None
        if isinstance(module, nn.Linear):
            forward = linear_forward if type(module) is nn.Linear else None
            yield _found(module, "projections", forward, _OWN_CLASS)
        elif isinstance(module, nn.Embedding):
            forward = _embedding if type(module) is nn.Embedding else None
            yield _found(module, "embeddings", forward, _OWN_CLASS)
        elif (eps := eps_name(module)) is not None:
            norm = self._try(norm_form, module, eps)
            forward = None if norm is None else norm_forward(norm, eps)
            yield _found(module, "norms", forward, _ANOTHER_FORM)
        elif is_router_like(module):
            form = self._try(router_form, module)
            if form is not None:  # else it may be anything that has a weight, and is not reported
                yield _if_plain(module, router_forward(form), {"routers": ""})
        else:
            yield from _attention(module)


def _found(module: nn.Module, kind: str, forward: Forward | None, otherwise: str) -> Found:
    if forward is None:
        return _left(module, {kind: ""}, otherwise)
    return (
        _left(module, {kind: ""}, _HOOKED) if _is_hooked(module) else _if_plain(module, forward, {kind: ""})
    )


def _if_plain(module: nn.Module, forward: Forward, kinds: dict[str, str]) -> Found:
    """Found, unless a parameter is a tensor subclass (quantised, split by others), which computes by rules
    of its own."""
    is_plain = all(type(p) is nn.Parameter for p in module.parameters(recurse=False))
    return Found(module, forward, kinds) if is_plain else _left(module, kinds, "of tensors of their own kind")


def _left(module: nn.Module, kinds: dict[str, str], reason: str) -> Found:
    return Found(module, None, {kind: why or reason for kind, why in kinds.items()})


def _is_hooked(module: nn.Module) -> bool:
    """Hooks on the module. Those on parameters were refused before."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks)
    return any((*hooks, module._backward_hooks))


# Attention


def _attention(module: nn.Module) -> Iterator[Found]:
    own = type(module).forward
    if not any(True for _ in module.children()):
        return
    if has_unknown_rotation(own):
        yield _left(module, {"rotary positions": ""}, _ANOTHER_FORM)
    made = attention_forward(own)
    if made is not None:
        kinds = {"rotary positions": ""} if made.turns else {}
        if made.attends:
            chosen = attends_by(module)
            kinds["attentions"] = "" if chosen == "sdpa" else f"by {chosen}"
        yield _if_plain(module, made.forward, kinds)


def _embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    return embed_tokens(self, input)
