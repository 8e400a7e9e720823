"""What a run is made of, as one tree: models, optimizers, anything that can return and load its state.

=================================================  =========================================================
``nn.Module``                                      its parameters and persistent buffers, by name
``torch.optim.Optimizer``                          its state by parameter name: it survives regrouping;
                                                   see :mod:`fsdmoe.checkpoint.settings` for its settings
object with ``checkpoint_state()``                 that tree; tensors in it are filled in place, then
                                                   ``load_checkpoint_state(tree)`` is called with the values
object with ``state_dict()``, ``load_state_dict``  the same with these names
dict, tensor, plain value                          itself
=================================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdmoe.checkpoint.adapter_names import stored_name
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import StoredTensor
from fsdmoe.checkpoint.settings import OptimizerSettings, settled
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_tensor, placement_of
from fsdmoe.fsdp import ShardedTensor, engine_of, is_fully_sharded
from fsdmoe.fsdp.frozen_codes import CodedUnit, coded_units
from fsdmoe.fsdp.subclass import inner_tensors, is_subclass
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.optim.groups import MEMBERS, of_most_members


@runtime_checkable
class Checkpointed(Protocol):
    """Something that takes part in checkpoints."""

    def checkpoint_state(self) -> dict[str, Any]:
        """A tree of live tensors (a load writes into them) and plain values."""
        ...

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Called after a load with the same tree, holding the stored values."""
        ...


def collect(parts: Mapping[str, Any], meshes: Meshes | None = None) -> Tree:
    """The tree of all parts; tensors in it are the live ones."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    return {key: _state_of(key, part, models, meshes) for key, part in parts.items()}


def _state_of(key: str, part: Any, models: list[nn.Module], meshes: Meshes | None) -> Any:
    if isinstance(part, Checkpointed):
        return part.checkpoint_state()
    if isinstance(part, nn.Module):
        _refuse_merged_adapters(part)
        return model_state(part, meshes)
    if isinstance(part, torch.optim.Optimizer):
        return optimizer_state(part, models)
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    return part


def restore(parts: Mapping[str, Any], tree: Tree, settings: OptimizerSettings = "built") -> Tree:
    """Hand the loaded state to the parts that take it; returns those that are plain values."""
    plain: Tree = {}
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    for key, part in parts.items():
        state = tree.get(key)
        if isinstance(part, torch.optim.Optimizer):
            with settled(part, key, settings):
                _load_optimizer(part, state or {}, models)
        elif isinstance(part, Checkpointed):
            part.load_checkpoint_state(state or {})
        elif isinstance(part, nn.Module):
            if is_fully_sharded(part):  # filled in place, past the version counters that the engine watches
                engine_of(part).mark_changed()
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            part.load_state_dict(state)
        else:
            plain[key] = state
    return plain


def refuse_codes(model: nn.Module, does: str) -> None:
    """Raise where weights are kept as codes: whole weights have no place for them."""
    coded = [n for n, p in model.named_parameters() if isinstance(p, ShardedTensor) and p.access.is_coded]
    if coded:
        raise ConfigError(
            f"precision.frozen_dtype: expected none for a model that {does}, got {coded[0]} and "
            f"{len(coded) - 1} more in codes, which would be left out; take them from the folder that the "
            "model was loaded from, or build it without the key"
        )


def model_state(model: nn.Module, meshes: Meshes | None = None) -> dict[str, torch.Tensor]:
    """Parameters (a tied one under its first name) and persistent buffers, by global name: that without
    adapters (:mod:`fsdmoe.checkpoint.adapter_names`)."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedTensor) and parameter.access.is_coded:
            continue  # frozen, kept as codes, and read from where it came again
        for path, part in inner_tensors(parameter) if is_subclass(parameter) else [("", parameter)]:
            full = f"{name}.{path}" if path else name
            _put(found, full, _global(full, part, meshes))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                _put(found, full, _global(full, buffer, meshes))
    return found


def _refuse_merged_adapters(model: nn.Module) -> None:
    """A checkpoint of merged weights and of their adapters would, once loaded, add the adapters twice."""
    for name, module in model.named_modules():
        if merged := module.__dict__.get("merged_adapters"):
            raise CheckpointError(
                f"{name}: expected weights without adapters, got {', '.join(merged)} merged into them; call "
                "unmerge_adapter() before, or save the model of merge_and_unload()"
            )


def coded_parts(parts: Mapping[str, Any]) -> list[tuple[CodedUnit, Tree]]:
    """Frozen weights that models keep as codes, unit by unit: how to open them, and their tree. They are in
    no checkpoint of such a model, but one that has them fills them."""
    return [
        (unit, {key: {stored_name(name): tensor for name, tensor in unit.tensors.items()}})
        for key, part in parts.items()
        if isinstance(part, nn.Module) and is_fully_sharded(part)
        for unit in coded_units(engine_of(part).units)
    ]


def _put(found: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    stored = stored_name(name)
    if stored in found:
        raise CheckpointError(f"{name}: another tensor is stored as {stored} already; rename one of them")
    found[stored] = tensor


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, with the name each is saved under."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[stored_name(name)] = stored_name(owner)
    return tied


def _global(name: str, tensor: torch.Tensor, meshes: Meshes | None) -> torch.Tensor:
    """A tensor that says which part of the global one it is."""
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name} is on the meta device; materialise the model before saving or loading")
    if isinstance(tensor, ShardedTensor) or not isinstance(tensor, DTensor):
        return tensor.detach()
    local = local_tensor(tensor)
    if meshes is None:
        raise CheckpointError(
            f"{name} is the local part {tuple(local.shape)} of {tuple(tensor.shape)}; "
            "pass the meshes that split it"
        )
    if not local.is_contiguous():
        raise CheckpointError(f"{name} is split over mesh axes and not contiguous; make it contiguous")
    # every rank of the shard axis holds the whole local tensor, so the one box list fits all of them
    return ShardedTensor(local.view(-1), placement_of(tensor, meshes), 0, local.numel(), meshes, Axis.WORLD)


def optimizer_state(optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> Tree:
    """State and group settings of a torch optimizer, keyed by parameter name."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    state: Tree = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError("the optimizer holds a parameter that the model does not have")
            name = names[id(parameter)]
            if name in state:
                raise CheckpointError(
                    f"{name}: the optimizer holds a parameter of this name of two models, and states are "
                    "kept by name; save the models as one (torch.nn.ModuleDict), or make two optimizers"
                )
            state[name] = dict(optimizer.state.get(parameter, {}))
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        | {MEMBERS: [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def make_optimizer_state(
    optimizer: torch.optim.Optimizer, models: list[nn.Module], stored: Mapping[str, StoredTensor], prefix: str
) -> None:
    """Give a fresh torch optimizer the tensors that a load fills; by itself it makes them in its first
    step."""
    by_name: dict[str, dict[str, StoredTensor]] = {}
    for full, tensor in stored.items():
        head, _, key = full.rpartition("/")
        by_name.setdefault(head.removeprefix(f"{prefix}/state/"), {})[key] = tensor
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in (pair for model in models for pair in model.named_parameters()):
        if id(parameter) not in held:
            continue
        for key, tensor in by_name.get(name, {}).items():
            if key in optimizer.state[parameter]:
                continue
            alike = tensor.shape == tuple(parameter.shape) and bool(tensor.shape)
            made = torch.zeros_like(parameter, dtype=tensor.dtype) if alike else torch.zeros(tensor.shape)
            optimizer.state[parameter][key] = made.detach()


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Tree, models: list[nn.Module]) -> None:
    if isinstance(optimizer, Checkpointed):
        optimizer.load_checkpoint_state(state)
        return
    groups = state.get("groups", [])
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{len(optimizer.param_groups)} parameter groups here, {len(groups)} in the checkpoint: "
            "group the parameters as they were, or load the model only"
        )
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        # Those of an early version have no members: the group at the same place is taken.
        mine = {names.get(id(parameter), "") for parameter in group["params"]}
        for key, value in of_most_members(number, mine, groups).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _plain(value: Any) -> Any:
    """A group's setting as JSON keeps it; tensors (a learning rate, say) as their number."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
