"""Which modules of a wrapped model are experts, recognised by structure: the interface between such models
and EP.

An *experts module* holds the fused weights of all experts of a layer and is called as
``experts(hidden_states [T, H], expert ids [T, K], weights [T, K]) -> [T, H]``. Its router stays what it is:
another module, or part of the block around it. This is how transformers writes nearly all of them, and
:mod:`fsdmoe.huggingface.expert_forms` recognises them by what they compute.

For a module that it does not recognise, write an adapter: a function from the module to an
:class:`ExpertsSpec`, or None where it does not apply::

    @register_moe_adapter
    def my_experts(module: nn.Module) -> ExpertsSpec | None:
        if not isinstance(module, MyExperts):
            return None
        return ExpertsSpec(
            num_experts=64, hidden_size=2048, intermediate_size=1024,
            gate_up="w13", down="w2", arguments=("x", "chosen", "scores"),
        )
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from torch import nn

from fsdmoe.huggingface.expert_forms import fused_experts
from fsdmoe.huggingface.expert_spec import ExpertsSpec

logger = logging.getLogger(__name__)

Adapter = Callable[[nn.Module], ExpertsSpec | None]
_registered: list[Adapter] = []


def register_moe_adapter(adapter: Adapter) -> Adapter:
    """Let ``fsdmoe.parallelize`` ask ``adapter`` about every module, before its own; a decorator.

    Args:
        adapter: From a module to the ``ExpertsSpec`` of its experts, or None where it does not apply.

    Returns:
        ``adapter`` itself.
    """
    if adapter not in _registered:
        _registered.insert(0, adapter)
    return adapter


def unregister_moe_adapter(adapter: Adapter) -> None:
    """Remove a registered adapter."""
    _registered.remove(adapter)


def find_experts(model: nn.Module, *, skip: Collection[int] = ()) -> dict[str, ExpertsSpec]:
    """Every experts module of ``model`` that an adapter knows, by name; not those whose id is in ``skip``."""
    found: dict[str, ExpertsSpec] = {}
    for name, module in model.named_modules():
        if id(module) in skip or any(name.startswith(f"{other}.") for other in found):
            continue
        adapters = (*_registered, fused_experts)
        spec = next((spec for adapter in adapters if (spec := adapter(module))), None)
        if spec is not None:
            spec.check(name, module)
            found[name] = spec
    return found


def warn_of_unknown_moe(model: nn.Module, known: Iterable[str]) -> None:
    """Say which modules look like experts and will not be split."""
    for kind, names in find_unknown_moe(model, known).items():
        logger.warning(
            "experts: %d modules like %s (%s) have a form that is not known here: they are sharded and "
            "trained like dense layers, but not split over ep; to split them, describe them with "
            "fsdmoe.register_moe_adapter (docs/huggingface.md)",
            len(names), names[0], kind,
        )  # fmt: skip


def find_unknown_moe(model: nn.Module, known: Iterable[str]) -> dict[str, list[str]]:
    """Modules that look like experts and are not among the ``known`` ones: class name to module names."""
    unknown: dict[str, list[str]] = {}
    taken = set(known)
    for name, module in model.named_modules():
        if any(name == other or name.startswith(other + ".") for other in taken):
            continue
        if any(other.startswith(f"{name}.") for other in taken):  # adapters around known ones
            continue
        if name.rpartition(".")[2] in ("experts", "expert") and any(True for _ in module.parameters()):
            taken.add(name)
            kind = module[0] if isinstance(module, nn.ModuleList) and len(module) else module
            unknown.setdefault(type(kind).__name__, []).append(name)
    return unknown
