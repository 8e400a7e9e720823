"""The public call: a model, the meshes and a policy in, the same model out, fully sharded.

::

    model = fully_shard(model, meshes, FSDPPolicy(grad_divisor=1.0), init_fn=initialize)
    optimizer = AdamW(model, lr=3e-4)
    for step in range(steps):
        for i, batch in enumerate(micro_batches):
            with engine_of(model).micro_batch(last=i == len(micro_batches) - 1):
                model(**batch).loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.all_ranks import require_alike
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_tensor
from fsdmoe.fsdp.buffer import BufferPool, Scratch, Slot
from fsdmoe.fsdp.collectives import CommStreams
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.fsdp.context import GroupContext
from fsdmoe.fsdp.engine import ENGINE, Engine
from fsdmoe.fsdp.grads import GradBuffer, GradSlot
from fsdmoe.fsdp.materialize import BUILT_ALIKE, InitFn, agree_on_values, fill_group, place_buffers
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.plan import ModelPlan, SlotPlan, UnitPlan, factor_slot, plan_model
from fsdmoe.fsdp.subclass import FlatSubclass, take_apart
from fsdmoe.fsdp.torch_tools import refuse_conversion, teach_torch
from fsdmoe.fsdp.unit import Unit, WeightSlot
from fsdmoe.fsdp.units import OwnedParameter, UnitChoice, select_units
from fsdmoe.mesh import Axis, Meshes

logger = logging.getLogger(__name__)

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fully_shard(
    model: nn.Module, meshes: Meshes, policy: FSDPPolicy | None = None, *, init_fn: InitFn | None = None
) -> nn.Module:
    """Shard ``model`` in place over ``meshes`` and return it. Collective.

    Outside of forward its parameters are ``ShardedTensor`` pieces with global shapes; forward and backward
    gather and reduce on their own. Values that ranks have filled otherwise become those of the first rank.

    Args:
        model: Any module. Parameters that TP or EP split are DTensors on sub-meshes of ``meshes``.
        meshes: From ``build_meshes``.
        policy: What is sharded how, and in which number formats; None takes the defaults.
        init_fn: ``init_fn(name, parameter, out)`` fills parameters that are on the meta device, one at a
            time. It must depend on the name alone: a rank skips what it holds nothing of.

    Returns:
        ``model`` itself; ``engine_of(model)`` is its engine.

    Raises:
        ConfigError: A parameter cannot be sharded so; the message names it and the fix.
    """
    refuse_sharded(model)
    refuse_hooked(model)
    before = LostParameters(model.parameters())
    agree_on_values(model, meshes.device)
    shard_agreed(model, meshes, policy or FSDPPolicy(), init_fn)
    before.refuse_in(model)
    return model


def shard_agreed(model: nn.Module, meshes: Meshes, policy: FSDPPolicy, init_fn: InitFn | None) -> nn.Module:
    """:func:`fully_shard` of a model whose ranks agree on its values."""
    teach_torch()
    choices = select_units(model, policy)
    _check(meshes)
    subclasses: list[list[FlatSubclass]] = [[] for _ in choices]
    if {type(local_tensor(o.parameter)) for choice in choices for o in choice.owned} - {torch.Tensor}:
        subclasses = take_apart(choices, policy.fsdp.frozen_subclasses, meshes.device)
    plan = plan_model(choices, meshes, policy)
    _check_plan(plan, policy)
    require_alike(_told(plan), BUILT_ALIKE)
    place_buffers(model, meshes.device)
    engine = _build(choices, subclasses, plan, meshes, policy, init_fn)
    setattr(model, ENGINE, engine)
    refuse_conversion(model)
    if dist.get_rank() == 0:
        logger.info("fully sharded: %d units, buffers %s", len(engine.units), engine.pool.report)
    return model


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` (or ``parallelize``) was called on this model."""
    return hasattr(model, ENGINE)


def refuse_sharded(model: nn.Module) -> None:
    """ConfigError for a model on which it was."""
    if is_fully_sharded(model):
        raise ConfigError(
            f"parallelize: this {type(model).__name__} is parallel already; call parallelize (or "
            "fully_shard) once, or build the model again for other meshes"
        )


class LostParameters:
    """The parameters that a model had before it was sharded: an optimizer that holds them would step on
    tensors that nothing uses."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._plain = [weakref.ref(parameter) for parameter in parameters]

    def refuse_in(self, model: nn.Module) -> None:
        """Until a forward of ``model`` has run: ConfigError where an optimizer holds them."""

        def check(module: nn.Module, *_: Any) -> None:
            if any(ref() is not None for ref in self._plain):
                gc.collect()  # of an optimizer that was given up
            if _are_in_an_optimizer([held for ref in self._plain if (held := ref()) is not None]):
                name = type(module).__name__
                raise ConfigError(
                    f"parallelize: an optimizer holds parameters of {name} from before they were sharded, "
                    "which nothing uses any more; make it after fsdmoe.parallelize (or fully_shard). If it "
                    f"was, it took them from a module around {name}: shard that one too"
                )
            watching.remove()

        watching = model.register_forward_pre_hook(torch._dynamo.disable(check))


def _are_in_an_optimizer(parameters: list[nn.Parameter]) -> bool:
    lists = [each for each in gc.get_referrers(*parameters) if isinstance(each, list)] if parameters else []
    groups = [each for found in lists for each in gc.get_referrers(found) if isinstance(each, dict)]
    return any(any(group.get("params") is found for found in lists) for group in groups)


def refuse_hooked(model: nn.Module) -> None:
    """ConfigError for parameters with hooks, which the parameters that take their place would not call."""
    for name, parameter in model.named_parameters():
        hooks = {**(parameter._backward_hooks or {})}
        hooks |= getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if not all(map(_is_of_tp_plan, hooks.values())):
            raise ConfigError(
                f"parallelize: expected parameters without hooks, but {name} has one, which would never be "
                "called; use parameter.register_post_accumulate_grad_hook on the sharded model, or change "
                ".grad once backward has returned"
            )


def _is_of_tp_plan(hook: object) -> bool:
    """What transformers puts on norms of a model that it has split, at each first forward again."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("transformers.distributed.")


def _build(
    choices: list[UnitChoice],
    subclasses: list[list[FlatSubclass]],
    plan: ModelPlan,
    meshes: Meshes,
    policy: FSDPPolicy,
    init_fn: InitFn | None,
) -> Engine:
    device = meshes.device
    pool = BufferPool(device, _communicators(plan, meshes), register=policy.fsdp.register_buffers)
    streams = CommStreams(device)
    slots = _slots(plan.gather_slots, pool, WeightSlot)
    for each in filter(None, slots):
        each.free = streams.event()
    grad_slots = _slots(plan.grad_slots, pool, GradSlot)
    reduced = [group for unit in plan.units for group in unit.groups if group.reduced]
    largest_slice = max((group.layout.slice_numel for group in reduced), default=0)
    context = GroupContext(
        meshes=meshes,
        policy=policy,
        pool=pool,
        shard_device=torch.device("cpu") if policy.fsdp.cpu_offload else device,
        grad_divisor=meshes.size(Axis.LOSS) if policy.grad_divisor is None else policy.grad_divisor,
        scratch=Scratch(pool, largest_slice),
    )
    units = []
    for index, (choice, unit_plan) in enumerate(zip(choices, plan.units, strict=True)):
        name, slot = choice.name or "the root module", slots[index]
        grads = GradBuffer(name, grad_slots[index], streams)
        groups = _build_groups(unit_plan, choice.owned, context, slot, grads, init_fn)
        units.append(
            Unit(
                name, choice.module, groups, grads, slot, streams,
                is_root=choice.is_root, debug=policy.fsdp.debug,
            )
        )  # fmt: skip
        if subclasses[index]:
            units[-1].assemble(subclasses[index])
        units[-1].install()
    pool.register()
    return Engine(meshes, policy, plan, units, streams, pool)


def _build_groups(
    plan: UnitPlan,
    owned: list[OwnedParameter],
    context: GroupContext,
    slot: WeightSlot | None,
    grads: GradBuffer,
    init_fn: InitFn | None,
) -> list[ParamGroup]:
    """The unit's groups, side by side in its slots, with their weights in place."""
    used: dict[tuple[bool, torch.dtype], int] = {}

    def take(place: Slot | None, dtype: torch.dtype, numel: int) -> torch.Tensor:
        assert place is not None
        start = used.get((place is slot, dtype), 0)
        used[place is slot, dtype] = start + numel
        return place.buffers[dtype][start : start + numel]

    groups = []
    values = {o.name: o.parameter for o in owned}
    for o in owned:
        del o.parameter  # the last reference goes when its values are taken
    for group_plan in plan.groups:
        group = ParamGroup(group_plan, owned, context)
        numel, full = group_plan.layout.numel, group.weights.shard
        factors: torch.Tensor | None = None
        if group_plan.gathered:
            full = take(slot, group_plan.dtype, group_plan.stored(numel))
            if (form := group_plan.four_bit) is not None:
                factors = take(slot, torch.bfloat16, factor_slot(form, numel))[: form.factor_numel(numel)]
        assert full is not None
        group.bind_weights(full, factors)
        if group_plan.requires_grad:
            is_reduced = group_plan.reduced
            group.bind_grads(
                grads, take(grads.slot, context.policy.reduce_dtype, numel) if is_reduced else None
            )
        fill_group(group, values, full.device, init_fn)
        if group_plan.keeps_codes:
            group.weights.close()
        groups.append(group)
    return groups


_SlotT = TypeVar("_SlotT", bound=Slot)


def _slots(plan: SlotPlan, pool: BufferPool, make: Callable[..., _SlotT]) -> list[_SlotT | None]:
    """A slot for each unit, as planned; units that share one get the same object."""
    made = [
        make(
            str(index),
            {dtype: pool.zeros(numel, dtype) for dtype, numel in sizes.items()},
            shared=plan.slot_of_unit.count(index) > 1,
        )
        for index, sizes in enumerate(plan.sizes)
    ]
    return [None if index is None else made[index] for index in plan.slot_of_unit]


def _communicators(plan: ModelPlan, meshes: Meshes) -> list[dist.ProcessGroup]:
    axes: dict[Axis, None] = {}
    for unit in plan.units:
        for group in unit.groups:
            axes |= dict.fromkeys((group.axis, group.outer_axis))
    return [meshes.group(axis) for axis in axes if meshes.size(axis) > 1]


def _check(meshes: Meshes) -> None:
    degrees = meshes.degrees
    size = degrees.dp_outer * degrees.dp_shard * degrees.cp * degrees.tp
    if size != dist.get_world_size():
        raise ConfigError(
            f"mesh: the meshes were built for {size} ranks, but "
            f"{dist.get_world_size()} are running; build them with build_meshes after the process group is "
            "up"
        )


def _told(plan: ModelPlan) -> dict[str, str]:
    """Every parameter, with its place in the order of gathers and all that decides what is sent: one that is
    planned otherwise on one rank would be mixed up with its neighbours in every gather."""
    params = [(p, g, u) for u in plan.units for g in u.groups for p in g.params]
    return {
        f"parallelize: {param.name}": f"{list(param.placement.global_shape)} in "
        f"{str(param.dtype).removeprefix('torch.')}, {'trained' if param.requires_grad else 'frozen'}"
        f"{', quantised' if param.scaling is not None else ''}"
        f"{', rounded' if param.rounding is not None else ''}, number {number} over {group.axis} with "
        f"{unit.name or 'the root'}"
        for number, (param, group, unit) in enumerate(params)
    }


def _check_plan(plan: ModelPlan, policy: FSDPPolicy) -> None:
    is_quantised = any(group.scaling is not None for unit in plan.units for group in unit.groups)
    if policy.precision.quantized_weights and not is_quantised:
        raise ConfigError(
            "precision.quantized_weights: expected trained weights that a recipe covers, got none (they are "
            "frozen, kept out, or fully_shard was called on its own, which knows nothing of recipes); call "
            "fsdmoe.parallelize, let the recipe cover some, or set it to false"
        )
    if policy.precision.qat is not None and not any(g.is_rounded for unit in plan.units for g in unit.groups):
        raise ConfigError(
            "precision.qat: expected weights to round, got none (fully_shard was called on its own, which "
            "knows nothing of experts); call fsdmoe.parallelize, or leave it out"
        )
    for unit in plan.units:
        for group in unit.groups:
            if group.requires_grad and group.dtype not in _TRAINABLE and group.scaling is None:
                raise ConfigError(
                    f"precision: {group.params[0].name} is to be trained in {group.dtype}, which no backend "
                    f"can reduce; choose one of {', '.join(str(d) for d in _TRAINABLE)}, or freeze it"
                )
            empty = [param.name for param in group.params if param.numel == 0]
            if empty:
                raise ConfigError(f"fsdp: {empty[0]} has no elements; remove it from the model")
