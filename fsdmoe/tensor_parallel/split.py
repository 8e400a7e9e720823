"""Which parameters tensor parallelism splits, as declared by the modules that own them, and the splitting
itself.

A module that takes part has a method ``tensor_plan`` and a field ``tensor`` for the group::

    def tensor_plan(self) -> TensorPlan:
        return {"q_proj.weight": 0, "o_proj.weight": 1, "q_norm.weight": "heads", "o_proj.bias": "tokens"}

A number is the dim that is cut. A word says why the gradient of a parameter that stays whole is nonetheless
partial on every rank, which its sum over ``tp`` relies on: it is applied to the rank's own ``tokens``, or to
(or in front of) its own ``heads``. A parameter for which neither is true would be counted tp times, so a plan
must account for every parameter of its module. ``own`` for a submodule says that all of it sees the rank's
own tokens, or has a plan of its own. Modules without a plan work on the rank's own tokens.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe.core.errors import refuse
from fsdmoe.core.placement import Placement, SplitMeshes, register_split, split_parameter
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.tensor_parallel.group import TensorGroup

TensorPlan = dict[str, int | Literal["tokens", "heads", "own"]]


@runtime_checkable
class TensorParallel(Protocol):
    """A module that tensor parallelism can split."""

    tensor: TensorGroup

    def tensor_plan(self) -> TensorPlan: ...


def parallelize_tensors(model: nn.Module, meshes: Meshes) -> None:
    """Split what the modules' plans name over ``tp``, and connect the modules."""
    split_tensors(model, meshes)
    for module in model.modules():
        if isinstance(module, TensorParallel):
            module.tensor = TensorGroup.of(meshes)


def split_tensors(model: nn.Module, at: SplitMeshes) -> None:
    """Leave each planned parameter with this rank's slice: a DTensor on the mesh of ``tp``."""
    if at.size(Axis.TP) == 1:
        return
    slices: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter has several owners and one slice
    for name, module in model.named_modules():
        plan = module.tensor_plan() if isinstance(module, TensorParallel) else None
        if plan is None:
            continue
        _check(name, module, plan)
        for path, dim in plan.items():
            if isinstance(dim, int):
                _split(module, path, dim, at, slices)


def _split(
    module: nn.Module, path: str, dim: int, at: SplitMeshes, slices: dict[nn.Parameter, nn.Parameter]
) -> None:
    whole = module.get_parameter(path)
    if whole not in slices:
        placement = Placement(tuple(whole.shape), ((Axis.TP, Shard(dim)),))
        slices[whole] = split_parameter(whole, placement, at)
    owner, _, name = path.rpartition(".")
    register_split(module.get_submodule(owner), name, slices[whole])


def _check(name: str, module: nn.Module, plan: TensorPlan) -> None:
    """Every parameter of the module, but for those of inner modules that have plans of their own."""
    inner = {n for n, m in module.named_modules() if m is not module and isinstance(m, TensorParallel)}
    inner |= {path for path, value in plan.items() if value == "own"}
    prefixes = tuple(f"{path}." for path in inner)
    known = {n for n, _ in module.named_parameters() if not n.startswith(prefixes)}
    plan = {path: value for path, value in plan.items() if value != "own"}
    problems = [
        f"mesh.tp: the plan of {name} does not say what becomes of {path}; name the dim to cut, or "
        "'tokens' or 'heads' where each rank's gradient is a part of the sum"
        for path in sorted(known - plan.keys())
    ]
    problems += [
        f"mesh.tp: expected a dim, 'tokens' or 'heads' for {path} in the plan of {name}, got {plan[path]!r}"
        for path in sorted(known & plan.keys())
        if not isinstance(plan[path], int) and plan[path] not in ("tokens", "heads")
    ]
    problems += [
        f"mesh.tp: the plan of {name} names {path}, which the module does not have; drop it"
        for path in sorted(plan.keys() - known)
    ]
    refuse(problems)
