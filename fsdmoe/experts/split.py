"""How ``ep`` and ``etp`` cut the parameters of experts, in fsdmoe's modules and in others'."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.errors import ConfigError
from fsdmoe.mesh import Axis
from fsdmoe.placement import Coordinates, Placement, Shape, split_parameter


def expert_placement(num_experts: int, shape: Shape, view: Shape, etp_dim: int) -> Placement:
    """Of a parameter ``[E, *shape]`` seen as ``[E, *view]``: EP splits E, ETP one dim of that view."""
    splits = ((Axis.EP, 0), (Axis.ETP, etp_dim))
    return Placement("expert", (num_experts, *shape), (num_experts, *view), splits)


def whole_down_bias(bias_EH: Tensor | None, hidden_size: int, start: int) -> Tensor | None:
    """This ETP member's stretch of the bias, from ``start`` on, among zeros for those of the others."""
    if bias_EH is None or bias_EH.shape[1] == hidden_size:
        return bias_EH
    return F.pad(bias_EH, (start, hidden_size - start - bias_EH.shape[1]))


def split_parameters(module: nn.Module, placements: Mapping[str, Placement], meshes: Coordinates) -> None:
    """Leave each parameter with this rank's slice, carrying its placement in the whole."""
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        if tuple(whole.shape) != placement.global_shape:
            raise AssertionError(f"expected whole experts, got {name} {tuple(whole.shape)}: split already")
        module.register_parameter(name, split_parameter(whole, placement, meshes))


def down_bias_start(hidden_size: int, meshes: Coordinates) -> int:
    """Where this ETP member's stretch of ``down_proj_bias`` begins."""
    return meshes.rank(Axis.ETP) * hidden_size // meshes.size(Axis.ETP)


def check_split(meshes: Coordinates, *, num_experts: int, width: int, bias_width: int) -> None:
    """ConfigError for experts that ``ep`` or ``etp`` cannot divide; ``bias_width`` is 0 without a bias."""
    problems = [
        _not_a_divisor(axis, meshes.size(axis), number, what)
        for axis, number, what in (
            (Axis.EP, num_experts, "experts"),
            (Axis.ETP, width, "columns of an expert's width"),
            (Axis.ETP, bias_width, "hidden elements of the experts' bias"),
        )
        if number % meshes.size(axis)
    ]
    if problems:
        raise ConfigError(*problems)


def _not_a_divisor(axis: Axis, size: int, number: int, what: str) -> str:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    shown = ", ".join(map(str, divisors if len(divisors) <= 12 else [*divisors[:11], "…"]))
    return f"mesh.{axis}: expected a divisor of the {number} {what}, got {size}; choose one of {shown}"
