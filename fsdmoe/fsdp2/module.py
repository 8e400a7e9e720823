"""What FSDP2 users call on a wrapped module, over fsdmoe's engine.

``fully_shard`` puts one of these classes in front of a module's own, as FSDP2 does: ``FSDPBlock`` is an
``FSDPModule`` and a ``Block``. Methods that mean the same exist under FSDP2's names; the others are refused,
by name, with what to do instead (:data:`_REFUSED`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import Engine
from fsdmoe.fsdp.unit import Unit
from fsdmoe.fsdp2.policies import Settings

STATE = "_fsdmoe_fsdp2"


class WrapState:
    """What is known of one wrapped module."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: Engine | None = None
        """None until the root is wrapped."""
        self.unit: Unit | None = None
        """None until then, and for a module without parameters."""
        self.syncs = self.all_reduces = True
        """Of the root: what the next backward is to do."""


class UnshardHandle:
    """Waits for :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """From now on the module shows whole parameters."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.hold()


class FSDPModule:
    """A module that ``fully_shard`` wrapped."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the module's own class: containers make others of their kind when they are sliced."""
        own = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
        made: Any = own.__new__(own)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a wrapped module cannot be copied, as under FSDP2; build the model again and load a state dict"
        )

    # Weights

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Nothing to do for a model from the meta device: its shards have memory since ``fully_shard``. They
        are NaN until they are initialised or loaded."""
        _built(self, "to_empty")
        for parameter in cast(nn.Module, self).parameters(recurse):
            if parameter.device.type != torch.device(device or "cpu").type:
                raise ConfigError(
                    f"fsdp2.to_empty: expected {parameter.device}, where the shards are, got {device}"
                )
        return self

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters (not its children's) and let it show them whole.

        They stay until ``reshard()`` or the module's next forward; two units whose memory is shared cannot be
        whole at a time."""
        state, engine = _built(self, "unshard")
        if state.unit is not None:
            engine.unshard(state.unit)
        handle = UnshardHandle(state.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show this module's sharded parameters again."""
        state, _ = _built(self, "reshard")
        if state.unit is not None:
            state.unit.let_go()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Only what ``fully_shard`` was told: memory is planned then."""
        self._require_planned("set_reshard_after_forward", reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False needs memory of their own for gathered weights; in it they stay until weights change."""
        if not reshard_after_backward:
            self._require_planned("set_reshard_after_backward", False, recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's weights at all."""
        state, _ = _built(self, "set_unshard_in_backward")
        if state.unit is not None:
            state.unit.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Nothing to set: the engine gathers ahead in the order that it saw in the step before."""
        _require_wrapped("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Nothing to set, as in forward."""
        _require_wrapped("set_modules_to_backward_prefetch", modules)

    # Gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backward completes the step's gradients; False: more micro-batches follow.

        Gradients are reduced into shards all the same, which needs no memory for whole ones; they cannot be
        read before a backward with True."""
        state, engine = _root(self, "set_requires_gradient_sync", recurse)
        state.syncs = requires_gradient_sync
        engine.is_last_micro_batch = state.syncs and state.all_reduces

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: whether the next backward sums over replicas."""
        state, engine = _root(self, "set_requires_all_reduce", recurse)
        state.all_reduces = requires_all_reduce
        engine.is_last_micro_batch = state.syncs and state.all_reduces

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to set: every backward ends with all it started being done."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ConfigError(f"fsdp2.set_gradient_divide_factor: expected a number above 0, got {factor}")
        state, _ = _built(self, "set_gradient_divide_factor")
        if state.unit is not None:
            state.unit.grads.set_divisor(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Always so: a parameter that a rank did not use counts as a gradient of zero."""
        if not reduce_scatter_unused_params:
            raise ConfigError(
                "fsdp2.set_reduce_scatter_unused_params: gradients of a unit are reduced as one, unused "
                "parameters as zeros; leave it out, or set their .grad to None before the step"
            )

    def reset_iter_state(self) -> None:
        """After an exception; the engine recovers by itself, and this drops the gradients."""
        _root(self, "reset_iter_state", True)[1].zero_grad()

    def _require_planned(self, what: str, reshards: bool, recurse: bool) -> None:
        module = cast(nn.Module, self)
        for inner in module.modules() if recurse else [module]:
            if isinstance(inner, FSDPModule):
                state, engine = _built(inner, what)
                unit = state.unit
                if unit is None or unit is engine.root:
                    continue  # the root's memory is its own in any case
                if reshards != (state.settings.reshard_after_forward is not False):
                    raise ConfigError(
                        f"fsdp2.{what}: memory for gathered weights of {unit.name} was planned by "
                        f"fully_shard; pass reshard_after_forward={reshards} to it"
                    )

    def _build(self) -> None:
        """Make it a root if it is none yet and no unit of one; see ``PendingModule``."""


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Run a method of a wrapped module as its ``forward`` is run: with whole parameters.

    Modules that are not wrapped are not changed, as under FSDP2."""
    if not isinstance(module, FSDPModule):
        return
    method: Callable[..., Any] | None = getattr(module, method_name, None)
    if method is None:
        raise ConfigError(f"fsdp2: {type(module).__name__} has no method {method_name!r} to register")

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        state, engine = _built(module, f"register_fsdp_forward_method({method_name!r})")
        if state.unit is None:
            return method(*args, **kwargs)
        return engine.run(state.unit, method, args, kwargs)

    setattr(module, method_name, run)


def state_of(module: Any) -> WrapState:
    """What ``fully_shard`` noted of a wrapped module."""
    return getattr(module, STATE)


def _built(module: FSDPModule, what: str) -> tuple[WrapState, Engine]:
    module._build()
    state = state_of(module)
    assert state.engine is not None, what
    return state, state.engine


def _root(module: FSDPModule, what: str, recurse: bool) -> tuple[WrapState, Engine]:
    state, engine = _built(module, what)
    if state.unit is not engine.root or not recurse:
        raise ConfigError(
            f"fsdp2.{what}: a step is of the whole model; call it on the root, with recurse=True, not on "
            f"{type(module).__name__} alone"
        )
    return state, engine


def _require_wrapped(what: str, modules: list[FSDPModule]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"fsdp2.{what}: expected modules that fully_shard wrapped, got {type(module).__name__}"
            )


def _refusing(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"fsdp2.{name}: {why}")

    refuse.__name__, refuse.__doc__ = name, f"Refused: {why}."
    return refuse


_REFUSED = {
    "set_custom_all_gather": "weights are gathered in place in planned buffers; there is no call to replace",
    "set_custom_reduce_scatter": "gradients are summed in place in planned buffers; fsdp.grad_exchange of "
    "fsdmoe.fsdp.FSDPConfig has another exchange",
    "set_all_reduce_hook": "sums over replicas run between other stages of a gradient; change .grad after "
    "backward",
    "set_post_optim_event": "gathers follow all work that was queued before the forward; leave it out",
    "set_force_sum_reduction_for_comms": "reductions are always sums; leave it out, and set the divisor with "
    "set_gradient_divide_factor",
    "set_reduce_scatter_max_input_buffers": "two gradient buffers alternate, always; leave it out",
    "set_separate_reduce_scatter_group": "reductions have a stream of their own and share the group; leave "
    "it out",
    "set_allocate_memory_from_process_group_for_comm": "buffers are registered with NCCL by default "
    "(fsdp.register_buffers of fsdmoe.fsdp.FSDPConfig); leave it out",
    "set_symm_mem_for_comm": "buffers are registered with NCCL by default (fsdp.register_buffers of "
    "fsdmoe.fsdp.FSDPConfig); leave it out",
}
for _name, _why in _REFUSED.items():
    setattr(FSDPModule, _name, _refusing(_name, _why))
