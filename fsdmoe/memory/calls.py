"""Calls inside a layer that ``memory.recompute`` and ``memory.offload`` may change.

A module makes such a call through a table of its own::

    self.memory_calls = plain_calls("router")
    logits, x = self.memory_calls["router"](router_logits, x, weight)

A plain call is ``operator.call``: nothing of this package runs. In a layer that recomputes or offloads,
:func:`change_calls` replaces the calls by those of the table below, before the first forward.

=================  =======================  ==============================  ========================
call               recomputed as            its first argument is           what it saves is
=================  =======================  ==============================  ========================
input_norm         norms
attention                                   attention_input                 qkv
projections        attention_projections    attention_input
mla_up             mla_up
head_norm          norms
attend             attention                qkv (and the next two)          attention_output
mlp_norm           norms                    mlp_norm_input
mlp                                         mlp_input
route                                       expert_input
router             router
experts                                     expert_input                    expert_pre_activation
shared_experts     shared_experts
activation         activation
=================  =======================  ==============================  ========================
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch import nn

from fsdmoe.memory.layer_call import name_activation, saving_as, tensors_in
from fsdmoe.memory.recompute import part

Call = Callable[..., Any]
"""``call(function, *args, **kwargs)``."""


class _Role(NamedTuple):
    """One row of the module's table."""

    part: str | None = None
    names: str | None = None
    saves: str | None = None
    num_named: int = 1


_ROLES = {
    "input_norm": _Role("norms"),
    "attention": _Role(names="attention_input", saves="qkv"),
    "projections": _Role("attention_projections", "attention_input"),
    "mla_up": _Role("mla_up"),
    "head_norm": _Role("norms"),
    "attend": _Role("attention", "qkv", "attention_output", num_named=3),
    "mlp_norm": _Role("norms", "mlp_norm_input"),
    "mlp": _Role(names="mlp_input"),
    "route": _Role(names="expert_input"),
    "router": _Role("router"),
    "experts": _Role(names="expert_input", saves="expert_pre_activation"),
    "shared_experts": _Role("shared_experts"),
    "activation": _Role("activation"),
}


def plain_calls(*names: str) -> dict[str, Call]:
    """A module's calls, as they are while nothing is recomputed or offloaded."""
    return {name: operator.call for name in names if _ROLES[name]}


def change_calls(layer: nn.Module) -> None:
    """Let the calls of a layer's modules be recomputed, and name what they keep."""
    for module in layer.modules():
        calls: dict[str, Call] = getattr(module, "memory_calls", {})
        for name in calls:
            calls[name] = partial(_marked, _ROLES[name])


def _marked(role: _Role, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if role.names is not None:
        for tensor in islice(tensors_in(args), role.num_named):
            name_activation(role.names, tensor)
    if role.part is not None:
        function = partial(part, role.part, function)
    if role.saves is not None:
        function = partial(saving_as, role.saves, function)
    return function(*args, **kwargs)
