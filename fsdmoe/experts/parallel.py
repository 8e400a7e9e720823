"""EP as a placement: split a MoE layer's experts over ``ep`` and ``etp``, and give it a dispatcher."""

from __future__ import annotations

from fsdmoe.errors import ConfigError
from fsdmoe.experts.dispatch import Choice, Links, build_dispatcher
from fsdmoe.experts.experts import GroupedExperts
from fsdmoe.experts.moe import MoE
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.placement import Coordinates, split_parameter


def parallelize_experts(moe: MoE, meshes: Meshes, *, dispatcher: str = "auto") -> Choice:
    """Split ``moe``'s experts (materialised or meta) in place; returns which dispatcher it got, and why."""
    split_experts(moe.experts, meshes)
    moe.dispatcher, choice = build_dispatcher(
        dispatcher, Links.of(meshes), num_experts=moe.experts.num_experts, top_k=moe.gate.spec.top_k
    )
    return choice


def split_experts(experts: GroupedExperts, meshes: Coordinates) -> None:
    """Leave each parameter with this rank's slice, carrying its placement in the whole."""
    check_split(
        meshes,
        num_experts=experts.num_experts,
        width=experts.intermediate_size,
        bias_width=0 if experts.down_proj_bias is None else experts.hidden_size,
    )
    for name, placement in experts.placements().items():
        whole = experts.get_parameter(name)
        if tuple(whole.shape) != placement.global_shape:
            raise AssertionError(f"expected whole experts, got {name} {tuple(whole.shape)}: split already")
        experts.register_parameter(name, split_parameter(whole, placement, meshes))
    experts.down_bias_start = down_bias_start(experts.hidden_size, meshes)


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
