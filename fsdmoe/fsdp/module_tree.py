"""Refuses parameters that were added to a model after it was sharded.

The engine owns the parameters that the modules held when it was built. Nobody owns a module, an adapter or a
parameter that was added later (``model.head = nn.Linear(...)``): each rank would train different values.

The engine calls this in its first forward, and in the next one after something was registered in a module of
the model, which torch tells, or after one of its module lists changed. So a step in which nothing was added
costs next to nothing. What is written straight into ``_modules`` or ``_parameters`` nobody tells: the engine
looks again every so many forwards.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp.subclass import is_subclass


def refuse_new_parameters(model: nn.Module, known: Container[tuple[int, str]]) -> None:
    """ConfigError that names parameters of ``model`` whose places (a module's id, a name in it) are not
    ``known``. Frozen tensor subclasses pass: ``fsdp.frozen_subclasses`` may leave them whole."""
    new = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
        and (id(module), name) not in known
        and (parameter.requires_grad or not is_subclass(parameter))
    ]
    if new:
        more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        raise ConfigError(
            f"parallelize: {new[0]}{more} came into the model after it was made parallel, so that each rank "
            "would train a copy of its own; replace modules and add parameters before parallelize (or "
            "fully_shard), or write new values into the old ones (copy_, load_state_dict)"
        )
