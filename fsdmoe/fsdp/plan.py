"""From units and placements to groups, flat layouts and buffer slots. Pure: the same code plans a real run
and a dry run for 1,024 ranks.

A unit's parameters fall into *groups* by (shard axis, dtype, requires_grad): one flat buffer and one
collective each. Gathered weights and gradients live in *slots*. A slot holds all groups of one unit side by
side, a tenant at a time:

========================  ===============================================================================
two rotating slots        repeated units, and whatever is no larger than the largest of them: they alternate
one wide slot             larger units: an embedding and a head are never needed at the same moment
its own slot              the root; units of which nothing may be evicted (see ``FSDPConfig``, ``FSDPPolicy``)
no slot                   groups sharded over a single rank: the gathered buffer is the shard itself (with
                          ``fsdp.lean`` or ``precision.qat`` a slot for weights, where they are cast or
                          rounded)
========================  ===============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import (
    Coordinates,
    Placement,
    SplitMeshes,
    computes_on_dtensor,
    local_tensor,
    placement_of,
)
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.fsdp.dtensor import DTensorView, is_split_by_dtensors
from fsdmoe.fsdp.layout import DEFAULT_GRANULE, FlatLayout, Item, align_elements, plan_layout
from fsdmoe.fsdp.units import OwnedParameter, UnitChoice, is_plain_embedding
from fsdmoe.mesh import Axis
from fsdmoe.precision.deployed_formats import WeightRounding, weight_rounding
from fsdmoe.precision.formats import Scaling
from fsdmoe.precision.four_bit import FourBit
from fsdmoe.precision.quantized_weight import weight_coding


@dataclass(frozen=True)
class ParamPlan:
    """What planning needs to know of a parameter."""

    name: str
    placement: Placement
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    """What it is computed in."""
    requires_grad: bool
    granule: int
    dtensor: DTensorView | None = None
    """What its module computes with, where that is a DTensor."""
    scaling: Scaling | FourBit | None = None
    """How it is quantised for its way to other ranks and for its products, where it is."""
    transposed: bool = False
    """Its codes are wanted transposed too, where one rank holds all of it."""
    rounding: WeightRounding | None = None
    """How it is rounded once it is gathered, where it is (``precision.qat``)."""
    grad_share: float = 1.0
    """What a rank's gradient counts for in the sum over the shard axis: less than 1 where every rank of
    ``tp`` has all of it. A DTensor's gradient says itself (:mod:`fsdmoe.fsdp.dtensor`)."""

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of what its module holds: two codes of four bits lie in a byte."""
        *others, last = self.local_shape or (1,)
        return (*others, last // 2) if isinstance(self.scaling, FourBit) else self.local_shape


@dataclass(frozen=True)
class GroupPlan:
    """Parameters of one unit that share a flat buffer."""

    axis: Axis
    outer_axis: Axis
    dtype: torch.dtype
    requires_grad: bool
    params: tuple[ParamPlan, ...]
    """In the order of the layout's segments."""
    layout: FlatLayout
    gathered: bool
    """Computed with in a slot: brought there from other ranks or from the host, cast from the main weights,
    or rounded there. False: one rank holds everything, and modules compute with its shard."""
    reduced: bool
    """Gradients are written into a slot and summed from there. False: backward writes what the optimizer
    reads (or there are none)."""

    @property
    def scaling(self) -> Scaling | FourBit | None:
        return self.params[0].scaling

    @property
    def four_bit(self) -> FourBit | None:
        """How codes lie two in a byte, where they do; all numbers of elements here count weights."""
        return self.scaling if isinstance(self.scaling, FourBit) else None

    def stored(self, numel: int) -> int:
        """Elements of ``dtype`` that so many weights take."""
        return numel if self.four_bit is None else numel // 2

    def bytes_of(self, numel: int) -> int:
        """What so many weights take in compute precision, with the factors of their blocks."""
        return numel * self.dtype.itemsize if self.four_bit is None else self.four_bit.bytes_of(numel)

    @property
    def is_rounded(self) -> bool:
        """Of all of its parameters, or of none."""
        return self.params[0].rounding is not None

    @property
    def keeps_codes(self) -> bool:
        """Quantised for good: nothing is trained, so nothing else is kept."""
        return self.scaling is not None and not self.requires_grad

    @property
    def keeps_transposed(self) -> bool:
        """Codes are there both ways round: together they take what bfloat16 would."""
        return self.params[0].transposed and not self.gathered

    def main_dtype(self, policy: FSDPPolicy) -> torch.dtype:
        return main_dtype(self.dtype, self.requires_grad, policy)

    def grad_dtype(self, policy: FSDPPolicy) -> torch.dtype:
        """Of main gradients."""
        return policy.grad_dtype if self.requires_grad and self.dtype.is_floating_point else self.dtype


def factor_slot(form: FourBit, numel: int) -> int:
    """Elements of a gathered buffer for the factors of so many weights; what follows starts aligned."""
    return -(-form.factor_numel(numel) // DEFAULT_GRANULE) * DEFAULT_GRANULE


def main_dtype(dtype: torch.dtype, requires_grad: bool, policy: FSDPPolicy) -> torch.dtype:
    """Of main weights; what is not trained stays in the dtype it is computed in."""
    return policy.main_dtype if requires_grad and dtype.is_floating_point else dtype


@dataclass(frozen=True)
class UnitPlan:
    """A unit's groups, and how its buffers are to be shared."""

    name: str
    groups: tuple[GroupPlan, ...]
    params: tuple[ParamPlan, ...]
    """Of all groups, in definition order."""
    repeated: bool = False
    is_root: bool = False
    keeps_params: bool = False
    gathers_in_backward: bool = True

    def gather_sizes(self) -> dict[torch.dtype, int]:
        """Elements per dtype that the unit needs in its gather slot."""
        gathered = [g for g in self.groups if g.gathered]
        coded = [(torch.bfloat16, factor_slot(g.four_bit, g.layout.numel)) for g in gathered if g.four_bit]
        return _sizes([*((g.dtype, g.stored(g.layout.numel)) for g in gathered), *coded])

    def grad_sizes(self, reduce_dtype: torch.dtype) -> dict[torch.dtype, int]:
        return _sizes((reduce_dtype, g.layout.numel) for g in self.groups if g.reduced)


@dataclass(frozen=True)
class SlotPlan:
    """Which slot each unit has for life, and how large the slots are."""

    slot_of_unit: tuple[int | None, ...]
    sizes: tuple[dict[torch.dtype, int], ...]
    """Elements per dtype of each slot."""

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(sizes) for sizes in self.sizes)


@dataclass(frozen=True)
class ModelPlan:
    units: tuple[UnitPlan, ...]
    gather_slots: SlotPlan
    grad_slots: SlotPlan


def plan_model(choices: Sequence[UnitChoice], at: SplitMeshes, policy: FSDPPolicy) -> ModelPlan:
    """Plan every buffer of a model for the rank at ``at``."""
    tp = at.size(Axis.TP)
    plain_share = 1.0
    if tp > 1 and is_split_by_dtensors((o.parameter for choice in choices for o in choice.owned), at):
        _refuse_own_tokens(choices, at)
        plain_share = 1 / tp
    units = []
    for choice in choices:
        params = tuple(_plan_parameter(owned, at, policy, plain_share) for owned in choice.owned)
        units.append(
            UnitPlan(
                choice.name, plan_groups(params, at, policy), params, choice.repeated, choice.is_root,
                choice.keeps_params, gathers_in_backward=not is_plain_embedding(choice.module),
            )
        )  # fmt: skip
    return _with_slots(tuple(units), policy)


def resize_plan(plan: ModelPlan, at: Coordinates, policy: FSDPPolicy) -> ModelPlan:
    """The same model at other sizes of the axes that cut it, and by another policy: what :func:`plan_model`
    gives for the model of those sizes, without building it. Units that share ``params`` share groups."""
    groups: dict[int, tuple[GroupPlan, ...]] = {}
    units = []
    for unit in plan.units:
        if id(unit.params) not in groups:
            params = [_resize_parameter(param, at, policy) for param in unit.params]
            groups[id(unit.params)] = plan_groups(params, at, policy)
        units.append(replace(unit, groups=groups[id(unit.params)], keeps_params=policy.fsdp.keeps_params))
    return _with_slots(tuple(units), policy)


def _resize_parameter(param: ParamPlan, at: Coordinates, policy: FSDPPolicy) -> ParamPlan:
    shape = param.placement.local_shape(at)
    return replace(param, local_shape=shape, granule=_granule(shape, policy, param.scaling))


def _with_slots(units: tuple[UnitPlan, ...], policy: FSDPPolicy) -> ModelPlan:
    return ModelPlan(
        units,
        plan_slots(units, [u.gather_sizes() for u in units], [u.keeps_params for u in units]),
        plan_slots(
            units,
            [u.grad_sizes(policy.reduce_dtype) for u in units],
            [policy.keeps_grads] * len(units),
        ),
    )


def _refuse_own_tokens(choices: Sequence[UnitChoice], at: SplitMeshes) -> None:
    """Refuse modules that fsdmoe split in a model that DTensors split: the former want the ranks of ``tp`` to
    have tokens of their own, the latter leave all tokens to each."""
    for owned in (o for choice in choices for o in choice.owned):
        if isinstance(owned.parameter, DTensor) and not computes_on_dtensor(owned.parameter):
            axes = ", ".join(axis for axis, _ in placement_of(owned.parameter, at).cuts)
            raise ConfigError(
                f"mesh.tp: fsdmoe split {owned.name} over {axes}, but DTensors split other parts of the "
                "model over tp and leave the same tokens to all of its ranks, which would count its "
                "gradient more than once; let one of them split all: name it in the plan (tp_plan, "
                "parallelize_module), or pass the model as it is and set mesh.tp"
            )


def plan_groups(
    parameters: Sequence[ParamPlan], at: Coordinates, policy: FSDPPolicy
) -> tuple[GroupPlan, ...]:
    """The flat buffers of one unit; matrices before vectors, so that weight decay covers whole ranges."""
    groups: dict[tuple[Any, ...], list[ParamPlan]] = {}
    for plan in parameters:
        is_rounded = plan.rounding is not None
        coding = (plan.scaling, plan.transposed, is_rounded)
        groups.setdefault((*shard_axes(plan, at), plan.dtype, *coding, plan.requires_grad), []).append(plan)
    planned = []
    for (axis, outer_axis, dtype, _, _, is_rounded, requires_grad), plans in groups.items():
        plans.sort(key=lambda p: len(p.placement.global_shape) < 2)
        by_name = {plan.name: plan for plan in plans}
        layout = plan_layout(
            [Item(p.name, p.numel, p.granule) for p in plans], at.size(axis), _alignment(plans[0])
        )
        travels = at.size(axis) > 1 or policy.fsdp.cpu_offload
        is_cast = policy.fsdp.lean and dtype != main_dtype(dtype, requires_grad, policy)
        planned.append(
            GroupPlan(
                axis, outer_axis, dtype, requires_grad,
                params=tuple(by_name[segment.name] for segment in layout.segments),
                layout=layout,
                gathered=travels or is_cast or is_rounded,
                reduced=travels and requires_grad,
            )
        )  # fmt: skip
    return tuple(planned)


def _alignment(plan: ParamPlan) -> int:
    """128 bytes in elements, and whole blocks of codes in four bits, which no slice cuts."""
    if isinstance(plan.scaling, FourBit):
        return math.lcm(2 * align_elements(1), plan.scaling.block)
    return align_elements(plan.dtype.itemsize)


def shard_axes(plan: ParamPlan, at: Coordinates) -> tuple[Axis, Axis]:
    """The axis that shards a parameter and the one that replicates the shards.

    Together with the axes that split it, the shard axis must span one whole replica of the model: elements
    are then owned once, and the sum over the shard axis is the whole gradient."""
    placement = plan.placement
    split = {axis for axis, _ in placement.cuts if at.size(axis) > 1}
    if placement.mesh == "expert":
        is_whole = at.size(Axis.ETP) > 1 and Axis.ETP not in split
        wanted = (Axis.EP,) if is_whole else (Axis.EP, Axis.ETP)
        required = {axis for axis in wanted if at.size(axis) > 1}
        axes = (Axis.EDP_ETP if is_whole else Axis.EDP), Axis.EXPERT_DP_OUTER
    else:
        required = {Axis.TP} if Axis.TP in split else set()
        axes = (Axis.FSDP if required else Axis.FSDP_TP), Axis.DP_OUTER
    if split != required:
        wrong = ", ".join(sorted(split ^ required))
        raise ConfigError(
            f"mesh: {plan.name} ({placement.mesh} mesh) is split by {sorted(split) or 'no axis'} where "
            f"{sorted(required) or 'no axis'} was expected (they differ in {wrong}): its gradient would not "
            "be summed over every rank that uses it; split it accordingly"
        )
    return axes


def plan_slots(
    units: Sequence[UnitPlan], needed: Sequence[dict[torch.dtype, int]], own_slots: Sequence[bool]
) -> SlotPlan:
    """Give each unit that needs memory a slot, as the table above says; ``own_slots``: which share none."""
    sizes: list[dict[torch.dtype, int]] = []
    slot_of_unit: list[int | None] = [None] * len(units)
    largest = max((_nbytes(n) for u, n in zip(units, needed) if u.repeated), default=0)
    largest = largest or max((_nbytes(n) for u, n in zip(units, needed) if not u.is_root), default=0)
    rotating: list[int] = []
    wide: list[int] = []
    num_rotating = 0
    for index, (unit, need, has_own) in enumerate(zip(units, needed, own_slots, strict=True)):
        if not need:
            continue
        if has_own or unit.is_root:
            slot = _new_slot(sizes)
        elif _nbytes(need) <= largest:
            if len(rotating) < 2:
                rotating.append(_new_slot(sizes))
            slot = rotating[num_rotating % 2]
            num_rotating += 1
        else:
            wide = wide or [_new_slot(sizes)]
            slot = wide[0]
        slot_of_unit[index] = slot
        for dtype, numel in need.items():
            sizes[slot][dtype] = max(sizes[slot].get(dtype, 0), numel)
    return SlotPlan(tuple(slot_of_unit), tuple(sizes))


def _plan_parameter(
    owned: OwnedParameter, at: SplitMeshes, policy: FSDPPolicy, plain_share: float
) -> ParamPlan:
    placement, parameter = _placement(owned, at), owned.parameter
    shape = placement.local_shape(at)
    coding = weight_coding(owned.places) if policy.has_codes else None
    scaling = None if coding is None else coding.scaling
    if isinstance(scaling, FourBit):
        dtype = torch.uint8
    elif scaling is not None:
        assert scaling.element.dtype is not None
        dtype = scaling.element.dtype
    elif owned.keeps_dtype or not parameter.dtype.is_floating_point:
        dtype = parameter.dtype
    else:
        dtype = policy.dtype_of(owned.name, parameter) if policy.dtype_of else policy.param_dtype
    return ParamPlan(
        owned.name, placement, shape, dtype, parameter.requires_grad,
        granule=_granule(shape, policy, scaling),
        dtensor=DTensorView.of(parameter) if computes_on_dtensor(parameter) else None,
        scaling=scaling, transposed=coding is not None and coding.transposed,
        rounding=None if policy.precision.qat is None else weight_rounding(owned.places),
        grad_share=1.0 if isinstance(parameter, DTensor) else plain_share,
    )  # fmt: skip


def _placement(owned: OwnedParameter, at: SplitMeshes) -> Placement:
    try:
        placement = placement_of(owned.parameter, at)
        wanted, held = placement.local_shape(at), tuple(local_tensor(owned.parameter).shape)
    except ConfigError as error:
        raise ConfigError(*(f"fsdp: {owned.name} is a DTensor: {p}" for p in error.problems)) from error
    if wanted != held:
        raise ConfigError(
            f"fsdp: {owned.name} is a DTensor {tuple(owned.parameter.shape)} whose placements mean {wanted} "
            f"on this rank, but it holds {held}; split it evenly, with the degrees of the meshes"
        )
    return placement


def _granule(shape: tuple[int, ...], policy: FSDPPolicy, scaling: Scaling | FourBit | None) -> int:
    plain = _plain_granule(shape, policy)
    return math.lcm(plain, scaling.block) if isinstance(scaling, FourBit) else plain


def _plain_granule(shape: tuple[int, ...], policy: FSDPPolicy) -> int:
    config = policy.fsdp
    if config.granule == "tensor":
        return max(1, math.prod(shape))
    if config.granule == "rows":
        return (config.granule_size or 1) * (shape[-1] if len(shape) > 1 else 1)
    return config.granule_size or DEFAULT_GRANULE


def _new_slot(sizes: list[dict[torch.dtype, int]]) -> int:
    sizes.append({})
    return len(sizes) - 1


def _sizes(pairs: Iterable[tuple[torch.dtype, int]]) -> dict[torch.dtype, int]:
    found: dict[torch.dtype, int] = {}
    for dtype, numel in pairs:
        found[dtype] = found.get(dtype, 0) + numel
    return found


def _nbytes(sizes: dict[torch.dtype, int]) -> int:
    return sum(numel * dtype.itemsize for dtype, numel in sizes.items())
