"""What a configuration costs before anything is built: bytes per rank and traffic per step, for any number
of ranks.

The numbers come from the planner that a real run uses, on a model whose parameters may be on the meta
device; no process group is needed, so a laptop can plan for 1,024 ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdmoe.core.placement import Coordinates
from fsdmoe.core.rules import size_text
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.fsdp.plan import GroupPlan, ModelPlan, plan_model
from fsdmoe.fsdp.units import select_units
from fsdmoe.mesh import Axis, Degrees, axis_sizes, mesh_without_groups


class PlannedMeshes:
    """The sizes that meshes of these degrees would have; this rank is the first along every axis."""

    def __init__(self, degrees: Degrees) -> None:
        self._sizes = axis_sizes(degrees)

    def size(self, axis: Axis) -> int:
        return self._sizes[axis]

    def rank(self, axis: Axis) -> int:
        return 0

    def submesh(self, *axes: Axis) -> DeviceMesh:
        return mesh_without_groups(dict.fromkeys(axes, 0), self._sizes)

    def axis_of(self, mesh: DeviceMesh, dim: int) -> Axis | None:
        """By its name: no other meshes than those above are planned with."""
        assert mesh.mesh_dim_names is not None
        return Axis(mesh.mesh_dim_names[dim])


@dataclass(frozen=True)
class ShardingTraffic:
    """Bytes that one rank receives in one optimizer step."""

    gathered: int
    """Weights, over the shard axes."""
    reduced: int
    """Gradients, over the shard axes."""
    replicated: int
    """Gradients, across replicas (``dp_outer``)."""
    num_collectives: int


@dataclass(frozen=True)
class MomentBytes:
    """What an optimizer's moments take on one rank."""

    device: int
    host: int = 0
    staging: int = 0
    """On the device: through which those of the host are stepped."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights: int
    """Shards in compute precision, and whole weights of groups that one rank holds alone."""
    main_weights: int
    gradients: int
    moments: int
    moment_staging: int
    """Through which moments in host memory are stepped."""
    gather_slots: int
    grad_slots: int
    handover: int
    """The largest gradient that autograd itself makes before it is put into its slot; none where a kernel
    writes it there directly."""
    traffic: ShardingTraffic
    num_parameters: int
    """Of the whole model, on all ranks."""
    padding: int
    """Elements on this rank that belong to no parameter, in all shards."""
    lent: int
    """Of the gradients, what is there only from a backward to its step."""
    host_moments: int
    """Moments in host memory, in addition to those on the device."""

    @property
    def total(self) -> int:
        """Everything that the engine and the optimizer hold; activations come on top."""
        return sum(
            getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("traffic", "num_parameters", "padding", "lent", "host_moments")
        )

    def peak(self, activations: int) -> int:
        """The most that is held at once: gradients under ``fsdp.lean`` are allocated while activations are
        freed."""
        return self.total + activations - min(self.lent, activations)

    def table(self) -> list[tuple[str, str]]:
        """Rows ``(what, how much)`` for a start-up or a dry-run table."""
        rows = [
            ("weights (compute precision)", self.weights), ("main weights", self.main_weights),
            ("gradients", self.gradients), ("optimizer moments", self.moments),
            ("moments in host memory (not in the sum)", self.host_moments),
            ("buffers to step those", self.moment_staging),
            ("slots for gathered weights", self.gather_slots), ("slots for whole gradients", self.grad_slots),
            ("a gradient on its way", self.handover), ("sum", self.total),
            ("weights received per step", self.traffic.gathered),
            ("gradients received per step", self.traffic.reduced),
            ("gradients across replicas per step", self.traffic.replicated),
        ]  # fmt: skip
        return [(name, size_text(value)) for name, value in rows]


MomentCount = Callable[[Sequence[GroupPlan], Coordinates], MomentBytes]
"""From the groups that are trained to what their moments take at a rank."""


def two_moments(groups: Sequence[GroupPlan], at: Coordinates) -> MomentBytes:
    """AdamW's, in float32 on the device."""
    return MomentBytes(sum(group.layout.slice_numel * 2 * torch.float32.itemsize for group in groups))


def plan_memory(
    model: nn.Module,
    degrees: Degrees,
    policy: FSDPPolicy | None = None,
    *,
    moments: MomentCount = two_moments,
    micro_batches: int = 1,
) -> MemoryPlan:
    """Plan ``model`` for ``degrees``. Parameters that are split (DTensors) count with their local shape.

    ``moments`` counts the optimizer's (:func:`fsdmoe.optim.count_state`).
    """
    policy = policy or FSDPPolicy()
    at = PlannedMeshes(degrees)
    return memory_of(plan_model(select_units(model, policy), at, policy), at, policy, moments, micro_batches)


def memory_of(
    plan: ModelPlan, at: Coordinates, policy: FSDPPolicy, moments: MomentCount, micro_batches: int = 1
) -> MemoryPlan:
    """What a run with this plan holds, and receives in a step."""
    all_trained = [group for unit in plan.units for group in unit.groups if group.requires_grad]
    held = moments(all_trained, at)
    weights = main_weights = gradients = num_parameters = padding = handover = 0
    for groups, count in _counted(plan):
        for group in groups:
            layout = group.layout
            weights += count * _cast_bytes(group, policy)
            if not group.keeps_codes:
                main_weights += count * layout.slice_numel * group.main_dtype(policy).itemsize
            padding += count * (layout.padding // layout.num_ranks)
            num_parameters += count * sum(math.prod(param.placement.global_shape) for param in group.params)
            if group.requires_grad:
                gradients += count * layout.slice_numel * group.grad_dtype(policy).itemsize
                handover = max(handover, *(param.numel * param.dtype.itemsize for param in group.params))
    return MemoryPlan(
        weights=weights,
        main_weights=main_weights,
        gradients=gradients,
        moments=held.device,
        moment_staging=held.staging,
        gather_slots=plan.gather_slots.nbytes,
        grad_slots=plan.grad_slots.nbytes,
        handover=handover,
        traffic=sharding_traffic(plan, at, policy, micro_batches),
        num_parameters=num_parameters,
        padding=padding,
        lent=gradients if policy.fsdp.lends_grads(micro_batches) else 0,
        host_moments=held.host,
    )


def _counted(plan: ModelPlan) -> list[tuple[tuple[GroupPlan, ...], int]]:
    """The groups of each unit, and how many units share them (:func:`fsdmoe.fsdp.plan.resize_plan`)."""
    counts = Counter(id(unit.groups) for unit in plan.units)
    distinct = {id(unit.groups): unit.groups for unit in plan.units}
    return [(groups, counts[key]) for key, groups in distinct.items()]


def _cast_bytes(group: GroupPlan, policy: FSDPPolicy) -> int:
    is_made = group.dtype != group.main_dtype(policy) and not (group.gathered and policy.fsdp.lean)
    if not (is_made or group.keeps_codes):
        return 0
    return group.bytes_of(group.layout.slice_numel) * (2 if group.keeps_transposed else 1)


def sharding_traffic(
    plan: ModelPlan, at: Coordinates, policy: FSDPPolicy, micro_batches: int
) -> ShardingTraffic:
    """What a rank receives of weights and gradients in one step."""
    gathers: Counter[int] = Counter()
    for unit, times in zip(plan.units, _count_gathers(plan, micro_batches), strict=True):
        gathers[id(unit.groups)] += times
    reductions = 1 if policy.fsdp.keeps_grads else micro_batches
    gathered = reduced = replicated = num = 0
    for groups, count in _counted(plan):
        times = gathers[id(groups)]
        for group in groups:
            ranks, replicas = group.layout.num_ranks, at.size(group.outer_axis)
            others = group.layout.slice_numel * (ranks - 1)
            if ranks > 1:
                gathered += times * group.bytes_of(others)
                num += times
            if group.requires_grad and ranks > 1:
                reduced += count * reductions * others * policy.sent_grad_bytes
                num += count * reductions
            if group.requires_grad and replicas > 1:
                nbytes = group.layout.slice_numel * group.grad_dtype(policy).itemsize
                replicated += count * (2 * nbytes * (replicas - 1) // replicas)
                num += count
    return ShardingTraffic(gathered, reduced, replicated, num)


def _count_gathers(plan: ModelPlan, micro_batches: int) -> list[int]:
    """How often each unit is gathered in a step, if units run in definition order: what stays in its slot is
    not gathered again. From the second micro-batch on, all are alike."""
    order = [len(plan.units) - 1, *range(len(plan.units) - 1)]
    order += [index for index in reversed(order) if plan.units[index].gathers_in_backward]
    tenant: dict[int, int] = {}
    count = [0] * len(plan.units)
    for times in (1, micro_batches - 1)[: min(2, micro_batches)]:
        for index in order:
            slot = plan.gather_slots.slot_of_unit[index]
            if slot is not None and tenant.get(slot) != index:
                tenant[slot] = index
                count[index] += times
    return count
