"""What changes the forward of a module: one ordered list, and the only file that assigns ``forward``.

A rewrite computes instead of a module's own forward, or around it. A module may have several, of features
that do not know each other. Its forward is composed anew whenever one is added, in the order of
:class:`Rewrite` and not in that of the calls. A norm whose layer recomputes and offloads::

    NAME( PART( FUSED ) )

What somebody else put on the module before (a hook of another library, ``torch.compile``) counts as its own
forward. What somebody puts there later stays, and rewrites that come after it are around it.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

_KEY = "rewritten"


class Rewrite(enum.Enum):
    """All of them, from the innermost to the outermost. The columns:

    ==========  ==============================================================================================
    by          who computes; for :func:`fsdmoe.explain`
    form        ``instead`` of the module's own forward, of which a module has one at most; ``around`` what is
                further inside; ``around own``: around the module's own forward, which nothing may replace
    matches     which modules get it
    after       rewrites that are decided before, so that this one sees which modules they took
    elsewhere   why other modules do not get it
    ==========  ==============================================================================================
    """

    EXPERTS = "ep", "instead", "fused experts of a known form", (), "others are trained like dense layers"
    TENSOR = "tp", "instead", "embedding, head, last projections", (), "others compute on what tp gives them"
    RECIPE = "a recipe", "instead", "layers in precision.covers", ("TENSOR",), "tp reads the recipe itself"
    FROZEN = "fp8 weights", "instead", "frozen linear layers", ("RECIPE",), "a recipe reads these itself"
    ROUTER = "routing policies", "instead", "routers of a known form", (), "other forms are refused"
    # Last of those that compute: it takes what the others leave.
    FUSED = (
        "a kernel",
        "instead",
        "layers that fsdmoe has too",
        ("FROZEN", "ROUTER"),
        "others compute something else",
    )
    SHELL = "the sharded model", "instead", "peft's tuner", (), "only peft calls past hooks that gather"
    LOSS = "the loss", "around own", "a plain head, its model", ("TENSOR",), "heads with more, other losses"
    ROTARY = "document lengths", "around", "rotary modules", (), "only dynamic and longrope follow a length"
    # Around kernels, which are run again too.
    PART = "recompute", "around", "norms, routers, activations, MLPs", ("FUSED",), "others are kept"
    ATTENTION = "recomputed attention", "around own", "attention by sdpa", (), "no place to cut"
    # Around parts: what a part keeps of its input must have its name by then.
    NAME = "offload", "around", "modules whose inputs have names", ("PART",), "others are never offloaded"
    OFFLOADED = "offloaded attention", "around own", "attention by sdpa", ("ATTENTION",), "no place to cut"
    NO_CACHE = "no cache", "around", "layers that recompute", (), "what runs once appends its keys once"
    LAYER_AGAIN = "recompute", "around", "whole layers", ("NO_CACHE",), "memory.recompute does not name layer"
    LAYER_CALL = "memory", "around", "layers that keep less", ("LAYER_AGAIN",), "others keep everything"
    TRAINER = "a trainer", "around", "the head's owner", ("LOSS",), "a tied head is gathered with the model"
    # Around the loss, to which it adds.
    POLICIES = "routing policies", "around", "the model", ("LOSS",), "only its output has a loss"
    REPLAY = "recorded routing", "around", "blocks with experts", ("NAME",), "others choose no experts"

    def __init__(self, by: str, form: str, matches: str, after: tuple[str, ...], elsewhere: str) -> None:
        self.by = by
        self.form = form
        self.matches = matches
        self.after = after
        self.elsewhere = elsewhere


class Applied(NamedTuple):
    """One rewrite of one module; ``says``: the words of :func:`fsdmoe.explain` for it."""

    which: Rewrite
    function: Callable[..., Any]
    args: tuple[Any, ...]
    says: str


class _Rewritten(NamedTuple):
    """What was done to one module."""

    own: Any = None
    """A forward that somebody else put on the module; None: the forward of its class."""
    inside: tuple[Applied, ...] = ()
    """Rewrites that were there before ``own`` was put around them."""
    applied: tuple[Applied, ...] = ()
    """Rewrites around ``own``."""
    forward: Any = None
    """All of it composed: what the module was given."""


def rewrite(
    module: nn.Module, which: Rewrite, function: Callable[..., Any], *args: Any, says: str = ""
) -> None:
    """Let ``function(module, ...)`` compute instead of the module's own forward, or
    ``function(*args, forward, ...)`` around what is further inside, as the list says of ``which``."""
    found = vars(module).get("forward")
    known = _known(module)
    if found is not known.forward:
        known = _Rewritten(found, inside=known.inside + known.applied)
    order = list(Rewrite)
    applied = (*known.applied, Applied(which, function, args, says or which.by))
    applied = tuple(sorted(applied, key=lambda each: order.index(each.which)))  # stable: a second is around
    if sum(each.which.form == "instead" for each in applied) > 1:
        raise AssertionError(f"expected one to compute a {type(module).__name__}, got {applied}")
    forward = types.MethodType(type(module).forward, module) if known.own is None else known.own
    for each in applied:
        forward = _composed(each, module, forward)
    module.forward = forward
    vars(module)[_KEY] = known._replace(applied=applied, forward=forward)


def _composed(each: Applied, module: nn.Module, forward: Any) -> Any:
    if each.which.form == "instead":
        # One function for all modules of a kind, or torch.compile would compile each of them for itself.
        return types.MethodType(each.function, module)
    made = functools.partial(each.function, *each.args, forward)
    made.__wrapped__ = forward  # type: ignore[attr-defined]  # trainers read which columns a model takes
    return made


def _known(module: nn.Module) -> _Rewritten:
    """What was done to it; nothing, if somebody took the forward off again."""
    return vars(module).get(_KEY, _Rewritten()) if "forward" in vars(module) else _Rewritten()


def rewrites_of(module: nn.Module) -> tuple[Applied, ...]:
    """From the innermost to the outermost."""
    known = _known(module)
    return known.inside + known.applied


def foreign_forward(module: nn.Module) -> Any:
    """What somebody else put on the module; None for the forward of its class, with rewrites or without."""
    known = _known(module)
    found = vars(module).get("forward")
    found = known.own if found is known.forward else found
    # Whoever takes a hook off may leave the forward of the class behind, as accelerate does.
    return None if found == types.MethodType(type(module).forward, module) else found


def computed_by(module: nn.Module) -> str | None:
    """Who computes the module or relies on its own forward; None where another may compute instead."""
    if foreign_forward(module) is not None:
        return "a forward of others"
    return next((each.which.by for each in rewrites_of(module) if each.which.form != "around"), None)
