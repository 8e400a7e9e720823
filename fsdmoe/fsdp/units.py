"""Which modules are units, and which unit owns which parameter.

A unit is a module whose parameters are gathered together. Units do not nest, except inside the root, which
takes what is left. A parameter that is reachable from two units (tied embeddings) belongs to the root, so
that it has one owner, one buffer, and one gradient that is reduced once both uses are done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import recall_splits
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.kernels.linear import Embedding

HEAD_NAMES = frozenset({"lm_head", "head", "output_head", "embed_out"})
_EXPERTS = frozenset({"experts", "expert"})
_INSIDE = frozenset({"base_layer", "original_module"})
"""What peft calls a layer that it put something around."""


@dataclass(frozen=True)
class UnitChoice:
    """A module that is to be a unit."""

    name: str
    module: nn.Module
    repeated: bool
    """One of several alike: served by the two alternating slots."""
    is_root: bool = False
    keeps_params: bool = False
    """Has memory of its own for its gathered weights."""
    owned: list[OwnedParameter] = field(default_factory=list)
    """Its parameters; each belongs to exactly one unit."""


@dataclass
class OwnedParameter:
    """A parameter and every place in the module tree where it is registered."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    keeps_dtype: bool = False
    """It is part of something, and computed with in the dtype it has."""


def select_units(model: nn.Module, policy: FSDPPolicy) -> list[UnitChoice]:
    """The units with their parameters, in definition order, then the root."""
    recall_splits(model)
    is_explicit = policy.units is not None or bool(policy.fsdp.units)
    chosen = dict(_explicit(model, policy) if is_explicit else _default(model))
    _refuse_nesting(chosen)
    kinds = Counter(type(module) for module in chosen.values())
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    listed = {id(element) for elements in lists for element in elements}
    units = [
        UnitChoice(
            name,
            module,
            repeated=id(module) in listed or kinds[type(module)] > 1,
            keeps_params=policy.keeps_params or (policy.keeps is not None and policy.keeps(name, module)),
        )
        for name, module in chosen.items()
        if any(True for _ in module.parameters())
    ]
    units.append(UnitChoice("", model, False, is_root=True))
    _assign_parameters(model, units)
    return units


def is_plain_embedding(module: nn.Module) -> bool:
    """An embedding's gradient needs indices only, unless its forward was wrapped to be run again."""
    forward = getattr(type(module), "forward", None)  # a class made on top of it may add methods
    return forward in (nn.Embedding.forward, Embedding.forward) and "forward" not in vars(module)


def _assign_parameters(model: nn.Module, units: list[UnitChoice]) -> None:
    """Give each unit its parameters; ``units`` ends with the root."""
    reached = _reached_from(model, units)
    owners: dict[int, set[int]] = {}
    parameters: dict[int, OwnedParameter] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            owned = parameters.setdefault(id(parameter), OwnedParameter(name, parameter))
            owned.places.append((module, attribute))
            owners.setdefault(id(parameter), set()).update(reached[id(module)])
    for key, owned in parameters.items():
        index = next(iter(owners[key])) if len(owners[key]) == 1 else len(units) - 1
        units[index].owned.append(owned)


def _reached_from(model: nn.Module, units: list[UnitChoice]) -> dict[int, set[int]]:
    """By which units each module, by its id, is run: one that layers share by several."""
    numbers = {id(unit.module): number for number, unit in enumerate(units)}
    reached: dict[int, set[int]] = {}
    waiting = [(model, len(units) - 1)]
    while waiting:
        module, number = waiting.pop()
        found = reached.setdefault(id(module), set())
        if number not in found:
            found.add(number)
            waiting += [(child, numbers.get(id(child), number)) for child in module.children()]
    return reached


def _explicit(model: nn.Module, policy: FSDPPolicy) -> Iterator[tuple[str, nn.Module]]:
    wanted, found = policy.units, False
    for name, module in model.named_modules():
        if module is model:
            continue
        if wanted is None:
            is_unit = type(module).__name__ in policy.fsdp.units
        elif isinstance(wanted, tuple):
            is_unit = isinstance(module, wanted)
        else:
            is_unit = wanted(name, module)
        if is_unit:
            if getattr(module.forward, "__func__", None) is nn.Module.forward:
                raise ConfigError(
                    f"fsdp.units: expected modules that are called, got {name} ({type(module).__name__}), "
                    "which only holds others; name their classes"
                )
            found = True
            yield name, module
    if not found and wanted != ():
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"fsdp.units: expected modules to gather one by one, but none in {type(model).__name__} was "
            f"chosen; name one of its classes ({', '.join(kinds[:12])}) or leave the key out"
        )


def _default(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Elements of the outermost module lists, and embeddings and heads outside of them; of a list of experts,
    of which each rank runs others, the module that has it, or the root."""
    taken: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in taken:
            continue
        if isinstance(module, nn.ModuleList):
            is_root = name in _EXPERTS
            for index, element in enumerate(module):
                if is_root:
                    taken |= {id(inner) for inner in element.modules()}
                elif id(element) not in taken:
                    yield f"{name}.{index}", element
                    taken |= {id(inner) for inner in element.modules()}
        elif module is not model and _has_experts(module):
            yield name, module
            taken |= {id(inner) for inner in module.modules()}
        elif module is not model and _is_vocabulary(name, module):
            if not _reads_its_base(module):
                yield name, module
            taken |= {id(inner) for inner in module.modules()}


def _has_experts(module: nn.Module) -> bool:
    """Each in a module of its own, which a rank runs if it has tokens for it."""
    return any(isinstance(module._modules.get(name), nn.ModuleList) for name in _EXPERTS)


def _is_vocabulary(name: str, module: nn.Module) -> bool:
    """An embedding or a head; with adapters around it the layer inside, which stays when they are merged and
    unloaded. A module whose adapter reads the weight outside of that layer's forward counts as a whole."""
    if _reads_its_base(module):
        return isinstance(module.get_submodule("base_layer"), nn.Embedding) or _is_head(name)
    is_around_another = not _INSIDE.isdisjoint(module._modules)
    return isinstance(module, nn.Embedding) or (_is_head(name) and not is_around_another)


def _is_head(name: str) -> bool:
    path = name.split(".")
    while len(path) > 1 and path[-1] in _INSIDE:
        path.pop()
    if path[-2:-1] == ["modules_to_save"]:  # the copy of one adapter
        path = path[:-2]
    return path[-1:] != [] and path[-1] in HEAD_NAMES


def _reads_its_base(module: nn.Module) -> bool:
    """DoRA, which reads the norms of the weight: the root owns it, and gathers it for the whole forward."""
    magnitudes = module._modules.get("lora_magnitude_vector")
    return "base_layer" in module._modules and isinstance(magnitudes, nn.ModuleDict) and len(magnitudes) > 0


def _refuse_nesting(chosen: dict[str, nn.Module]) -> None:
    names = {id(module): name for name, module in chosen.items()}
    for outer, module in chosen.items():
        for inner in module.modules():
            if inner is not module and id(inner) in names:
                raise ConfigError(
                    f"fsdp.units: {names[id(inner)]} is a unit inside the unit {outer}, and each would take "
                    "the other's buffer while it computes; choose one of the two"
                )
