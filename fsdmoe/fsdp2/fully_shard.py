"""``fully_shard`` as FSDP2 has it: block by block, then the root, over the engine of :mod:`fsdmoe.fsdp`.

FSDP2 shards at every call. Here a call on a block only notes that it is to be a unit, and the call on the
module around them, the root, plans and shards everything at once: buffers are shared between units, so all of
them must be known. A module that is wrapped with no wrapped module inside may still become either; it becomes
a root by being used (its parameters, its state dict, its forward).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp import fully_shard as shard_model
from fsdmoe.fsdp.outputs import cast_floats
from fsdmoe.fsdp2.meta import await_values, leave_empty, place_meta_buffers
from fsdmoe.fsdp2.module import STATE, FSDPModule, WrapState, state_of
from fsdmoe.fsdp2.policies import Settings, meshes_for, policy_for

_INSIDE = "_fsdmoe_fsdp2_inside"
"""Of a module and all inside of it: the class that was wrapped around them last."""


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen, and FSDP2's signature)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard a model as ``torch.distributed.fsdp.fully_shard`` does: call it on the blocks, then on the root.

    Args:
        module: A module, or a list of modules that are wrapped alike (each is a unit of its own).
        mesh: One dim (FSDP) or two (HSDP: replicate, shard), over all ranks in order; None takes all ranks.
        reshard_after_forward: False keeps a unit's gathered weights until its backward. The root's are kept
            in any case.
        shard_placement_fn: Refused: shards are flat.
        mp_policy: torch's ``MixedPrecisionPolicy``; ``param_dtype`` and ``reduce_dtype`` are the same in all
            calls.
        offload_policy: torch's ``CPUOffloadPolicy`` keeps shards in host memory; the same in all calls.
        ignored_params: Refused.
        dp_mesh_dims: Refused.

    Returns:
        ``module`` itself, now an ``FSDPModule``.

    Raises:
        ConfigError: What is asked for is not supported; the message names it and the fix.
    """
    _refuse(
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )
    settings = Settings(mesh, cast("bool | None", reshard_after_forward), mp_policy, offload_policy)
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        _wrap(each, settings)
    for each in modules:
        if _wrapped_inside(each):
            _build(each)
    return module


class PendingModule(FSDPModule):
    """Wrapped, and not known yet whether as a unit or as a root: the first use makes it a root.

    Then it gets another class, so that no forward pays for the question."""

    def _build(self) -> None:
        _build(cast(nn.Module, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._build()
        return cast(Any, self)(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self._build()
        return cast(Any, self).named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build()
        return cast(Any, self).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build()
        return cast(Any, self).load_state_dict(*args, **kwargs)


def _wrap(module: nn.Module, settings: Settings) -> None:
    if isinstance(module, FSDPModule):
        raise ConfigError(f"fsdp2: {type(module).__name__} is wrapped already; call fully_shard on it once")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ConfigError(
            f"fsdp2: {type(module).__name__} has no forward to gather weights for; wrap its elements"
        )
    around = getattr(module, _INSIDE, None)
    if around is not None:
        raise ConfigError(
            f"fsdp2: {type(module).__name__} is inside {around}, which was wrapped before it; wrap "
            "inside-out, as under FSDP2: blocks first, the module around them last"
        )
    for inner in module.modules():
        setattr(inner, _INSIDE, type(module).__name__)
    setattr(module, STATE, WrapState(settings))
    module.__class__ = _class_in_front(_own_class(module), PendingModule)


def _wrapped_inside(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if inner is not module and isinstance(inner, FSDPModule)]


def _build(root: nn.Module) -> None:
    """Shard everything inside ``root``, with the modules that were wrapped before as units."""
    inside = _wrapped_inside(root)
    settings = state_of(root).settings
    for inner in inside:
        name = type(inner).__name__
        if state_of(inner).engine is not None:
            nested = _wrapped_inside(inner)
            why = (
                f"it is wrapped around {type(nested[0]).__name__}, and units do not nest; wrap one of the two"
                if nested
                else "its parameters were used before the root was wrapped; wrap the root before that"
            )
            raise ConfigError(f"fsdp2: {name} inside {type(root).__name__} is a sharded model already: {why}")
        problem = state_of(inner).settings.problem(settings)
        if problem is not None:
            raise ConfigError(f"fsdp2: {name}: {problem}; pass the same to all calls of fully_shard")
    for module in (*inside, root):
        module.__class__ = _class_in_front(_own_class(module), FSDPModule)
    units = {inner: state_of(inner).settings for inner in inside}
    meshes = meshes_for(settings.mesh)
    is_empty = place_meta_buffers(root, meshes.device) | any(p.is_meta for p in root.parameters())
    shard_model(root, meshes, policy_for(root, settings, units), init_fn=leave_empty)
    engine = engine_of(root)
    if is_empty:
        await_values(root)
    for module in (*inside, root):
        state_of(module).engine = engine
        _install_casts(module, state_of(module).settings.mp_policy)
        module.register_state_dict_pre_hook(_reshard)
        module.register_load_state_dict_pre_hook(_reshard)
    for unit in engine.units:
        state_of(unit.module).unit = unit


def _reshard(module: Any, *_: Any) -> None:
    """State dicts are of sharded parameters, also while whole ones are shown."""
    module.reshard()


def _install_casts(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        module.register_forward_pre_hook(
            functools.partial(_cast_inputs, policy.param_dtype), with_kwargs=True
        )
    if policy.output_dtype is not None:
        module.register_forward_hook(functools.partial(_cast_output, policy.output_dtype))


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


def _own_class(module: nn.Module) -> Any:
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


@functools.cache
def _class_in_front(own: type, front: type) -> type:
    """``FSDPBlock`` for ``Block``: what ``print`` and ``isinstance`` see under FSDP2."""
    return type(f"FSDP{own.__name__}", (front, own), {"__module__": own.__module__})


def _refuse(**given: Any) -> None:
    reshard = given["reshard_after_forward"]
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        raise ConfigError(
            f"fsdp2.reshard_after_forward: {reshard} (a smaller world to reshard to) is not supported; pass "
            "True or False, or a mesh of two dims (HSDP), which keeps gathers inside of a node"
        )
    why = {
        "shard_placement_fn": "shards are flat ranges and have no dim; leave it out. fsdmoe.parallelize "
        "gives experts a mesh of their own",
        "ignored_params": "every parameter of a wrapped model is sharded; take these out of the model, or "
        "freeze them (requires_grad_(False))",
        "dp_mesh_dims": "the mesh is that of FSDP alone; fsdmoe.parallelize splits over tp, cp and ep",
    }
    for key, reason in why.items():
        if given[key]:
            raise ConfigError(f"fsdp2.{key}: {reason}")
