"""Adapters that peft puts around the weight of a router (``target_parameters``, and with them
``target_modules="all-linear"``, for a router of transformers is no linear layer).

peft registers a parametrization for each forward, which exchanges a parameter that the engine gathers and
releases. Here the updated weight hides the gathered one for the time of the call.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.lora import base_of, has_factors, path_around
from fsdmoe.huggingface.router_forms import is_router_like


def connect_other_parameters(model: nn.Module, experts: Iterable[str]) -> None:
    """Let routers with adapters by ``target_parameters`` compute; ConfigError for anything else than them and
    ``experts``: peft would put another weight in the place of one that is gathered and released."""
    known = {path_around(name) for name in experts}
    for name, module in model.named_modules():
        wrapper: Any = module
        parameter = getattr(module, "parameter_name", None)
        if not has_factors(module) or parameter is None or path_around(name) in known:
            continue
        base = base_of(module)
        if isinstance(base, nn.Embedding) or not is_router_like(base) or parameter != "weight":
            raise ConfigError(
                "adapter.target_parameters: expected weights of fused experts or routers, got "
                f"{parameter} of {name}; name it in target_modules if it is a linear layer, or drop it"
            )
        wrapper._activate_lora = types.MethodType(_activate_update, wrapper)


@contextlib.contextmanager
def _activate_update(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """The updated weight hides the one that is gathered, which stays the module's parameter."""
    base, name = wrapper.get_base_layer(), wrapper.parameter_name
    updates = [wrapper.get_delta_weight(adapter) for adapter in active_adapters if adapter in wrapper.lora_A]
    if updates:
        base.__dict__[name] = getattr(base, name) + sum(updates)
    try:
        yield
    finally:
        base.__dict__.pop(name, None)
