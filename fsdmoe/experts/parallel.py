"""EP as a placement: split a MoE layer's experts over ``ep`` and ``etp``, and give it a dispatcher."""

from __future__ import annotations

from torch import nn

from fsdmoe.errors import ConfigError
from fsdmoe.experts.dispatch import Choice, Links, build_dispatcher
from fsdmoe.experts.experts import GroupedExperts
from fsdmoe.experts.moe import MoE
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.placement import Coordinates, local_slice, set_placement


def parallelize_experts(moe: MoE, meshes: Meshes, *, dispatcher: str = "auto") -> Choice:
    """Split ``moe``'s experts (materialised or meta) in place; returns which dispatcher it got, and why."""
    split_experts(moe.experts, meshes)
    moe.dispatcher, choice = build_dispatcher(
        dispatcher, Links.of(meshes), num_experts=moe.experts.num_experts, top_k=moe.gate.spec.top_k
    )
    return choice


def split_experts(experts: GroupedExperts, meshes: Coordinates) -> None:
    """Leave each parameter with this rank's slice, carrying its placement in the whole."""
    check_split(experts, meshes)
    for name, placement in experts.placements().items():
        whole = experts.get_parameter(name)
        if tuple(whole.shape) != placement.global_shape:
            raise AssertionError(f"expected whole experts, got {name} {tuple(whole.shape)}: split already")
        local = nn.Parameter(
            local_slice(whole.detach(), placement, meshes), requires_grad=whole.requires_grad
        )
        set_placement(local, placement)
        experts.register_parameter(name, local)
        if name == "down_proj_bias":
            experts.down_bias_start = meshes.rank(Axis.ETP) * local.shape[1]


def check_split(experts: GroupedExperts, meshes: Coordinates) -> None:
    """ConfigError for experts that ``ep`` or ``etp`` cannot divide."""
    ep, etp = meshes.size(Axis.EP), meshes.size(Axis.ETP)
    problems = []
    if experts.num_experts % ep:
        problems.append(_not_a_divisor("ep", ep, experts.num_experts, "experts"))
    if experts.intermediate_size % etp:
        problems.append(_not_a_divisor("etp", etp, experts.intermediate_size, "columns of an expert's width"))
    if experts.down_proj_bias is not None and experts.hidden_size % etp:
        problems.append(
            _not_a_divisor("etp", etp, experts.hidden_size, "hidden elements of the experts' bias")
        )
    if problems:
        raise ConfigError(*problems)


def _not_a_divisor(axis: str, size: int, number: int, what: str) -> str:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    shown = ", ".join(map(str, divisors if len(divisors) <= 12 else [*divisors[:11], "…"]))
    return f"mesh.{axis}: expected a divisor of the {number} {what}, got {size}; choose one of {shown}"
