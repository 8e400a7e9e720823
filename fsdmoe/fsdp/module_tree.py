"""Finds parameters that were added to a model after it was sharded.

The engine owns the parameters that the modules held when it was built. Nobody owns a module, an adapter or a
parameter that was added later (``model.head = nn.Linear(...)``): each rank would train different values.
Before every forward the tree of modules is compared with the known one. Only if they differ is the new
parameter looked up, so an unchanged tree costs one comparison.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain, repeat

from torch import nn

from fsdmoe.errors import ConfigError

_VALUES = operator.methodcaller("values")


class ModuleTree:
    """The modules of a sharded model, and the places of its parameters, as they were when it was built."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {(id(module), name) for module, name, _ in _places(model)}
        # Held, so that no address of theirs is used again by a module that comes later.
        self._modules = list(model.modules())
        self._remember()

    def check(self) -> None:
        """ConfigError that names the parameters which the engine does not own."""
        if self._is_same():
            return
        new = [place for module, name, place in _places(self._model) if (id(module), name) not in self._known]
        if new:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise ConfigError(
                f"parallelize: {new[0]}{more} came into the model after it was made parallel, so that each "
                "rank would train a copy of its own; replace modules and add parameters before parallelize "
                "(or fully_shard), or write new values into the old ones (copy_, load_state_dict)"
            )
        self._modules += [module for module in self._model.modules() if module not in self._seen]
        self._remember()

    def _is_same(self) -> bool:
        children = chain.from_iterable(map(_VALUES, self._parents))
        return (
            list(map(len, self._children)) == self._num_children
            and all(map(operator.is_, children, self._held))
            and list(map(len, self._parameters)) == self._num_parameters
            and not any(map(operator.is_not, map(operator.getitem, *self._empty), repeat(None)))
        )

    def _remember(self) -> None:
        self._seen = set(self._modules)
        self._children = [module._modules for module in self._modules]
        self._num_children = list(map(len, self._children))
        self._parents = list(filter(None, self._children))
        self._held = list(chain.from_iterable(map(_VALUES, self._parents)))
        self._parameters = [module._parameters for module in self._modules]
        self._num_parameters = list(map(len, self._parameters))
        empty = [(held, name) for held in self._parameters for name, each in held.items() if each is None]
        self._empty = [held for held, _ in empty], [name for _, name in empty]
        """Places that a module keeps free (``bias=False``): filling one changes no number."""


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Every parameter's module, attribute and full name, a shared one at each of its places."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, f"{prefix}.{name}" if prefix else name
