"""How ``ep`` and ``etp`` cut the parameters of experts, in fsdmoe's modules and in others'."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdmoe.core.boxes import Shape
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Coordinates, Cut, Placement, SplitMeshes, register_split, split_parameter
from fsdmoe.experts.divide import ep_problems, etp_problems
from fsdmoe.mesh import Axis

_PARTS = "_fsdmoe_parts"
"""Of a whole parameter: what was made of it, for other modules that share it."""


def expert_placement(num_experts: int, shape: Shape, etp: Cut) -> Placement:
    """Of a parameter ``[E, *shape]``: EP splits E, ETP as ``etp`` says."""
    return Placement((num_experts, *shape), ((Axis.EP, Shard(0)), (Axis.ETP, etp)))


def whole_down_bias(bias_EH: Tensor | None, hidden_size: int, start: int) -> Tensor | None:
    """This ETP member's range of the bias, from ``start`` on; zeros elsewhere."""
    if bias_EH is None or bias_EH.shape[1] == hidden_size:
        return bias_EH
    return F.pad(bias_EH, (start, hidden_size - start - bias_EH.shape[1]))


def split_parameters(module: nn.Module, placements: Mapping[str, Placement], meshes: SplitMeshes) -> None:
    """Leave each parameter with this rank's slice: a DTensor on the mesh of ``ep`` and ``etp``."""
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        if isinstance(whole, DTensor) or tuple(whole.shape) != placement.global_shape:
            raise AssertionError(f"expected whole experts, got {name} {tuple(whole.shape)}: split already")
        owner, _, own = name.rpartition(".")
        parts = vars(whole).setdefault(_PARTS, {})
        if placement not in parts:
            parts[placement] = split_parameter(whole, placement, meshes)
        register_split(module.get_submodule(owner), own, parts[placement])


def down_bias_start(hidden_size: int, meshes: Coordinates) -> int:
    """Where this ETP member's range of ``down_proj_bias`` begins."""
    return meshes.rank(Axis.ETP) * hidden_size // meshes.size(Axis.ETP)


def check_split(meshes: Coordinates, *, num_experts: int, width: int, bias_width: int) -> None:
    """ConfigError for experts that ``ep`` or ``etp`` cannot divide; ``bias_width`` is 0 without a bias."""
    ep = meshes.size(Axis.EP)
    etp = meshes.size(Axis.ETP)
    if num_experts % ep or width % etp or bias_width % etp:
        raise ConfigError(*ep_problems(num_experts, ep), *etp_problems(width, bias_width, etp))
