"""The schedule: when each unit is gathered, computed and reduced. Hooks of modules and of autograd call it.

::

    forward    pre_forward(u)   u's weights are made ready, the next unit's gather starts, u's parameters
                                become whole
               post_forward(u)  the slot may be taken; hooks on u's outputs wait for its backward
    backward   pre_backward(u)  first gradient of any output of u arrives: every other unit in backward is
                                finished (its gradients are complete, autograd works in reverse order), u is
                                made ready, its gradient opens, the gather of the unit before it starts
               end              the remaining units are finished, the caller waits for all reductions

Recomputation calls ``pre_forward`` and ``post_forward`` in the middle of backward; they gather, and record
nothing. A backward that computes no parameter's gradient (``torch.autograd.grad``, ``backward(inputs=...)``)
gathers, and opens no gradient.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as torch_hooks

from fsdmoe.core.autograd import is_in_backward
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.labels import raise_noted
from fsdmoe.fsdp.buffer import BufferPool
from fsdmoe.fsdp.collectives import CommStreams
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.fsdp.guard import SlotGuard, check_whole_gradients
from fsdmoe.fsdp.memory_plan import MomentBytes, memory_of
from fsdmoe.fsdp.module_tree import refuse_new_parameters
from fsdmoe.fsdp.outputs import cast_floats, tensors_of
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.plan import ModelPlan
from fsdmoe.fsdp.release import PROBLEM, Keep, ReleasedMemory
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.fsdp.unit import Unit, accumulates_any
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.precision.config import torch_dtype

ENGINE = "_fsdmoe_engine"
"""The attribute under which a model holds its engine."""
_FORWARDS_PER_LOOK = 128
"""For parameters that nobody registered; see :mod:`fsdmoe.fsdp.module_tree`."""


class RunOrder:
    """The recorded sequence of units, so that the next one can be gathered ahead of time: from where a run
    differs from it, it is recorded again."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def advance(self, unit: Unit) -> Unit | None:
        """``unit`` runs now; returns the unit that ran after it the last time, if all went as recorded so
        far."""
        at = self._next
        self._next += 1
        if at < len(self.units) and self.units[at] is not unit:
            del self.units[at:]
        if at == len(self.units):
            self.units.append(unit)
        return self.units[at + 1] if at + 1 < len(self.units) else None


class Engine:
    """A fully sharded model's schedule; get it with :func:`fsdmoe.fsdp.engine_of`."""

    def __init__(
        self,
        meshes: Meshes,
        policy: FSDPPolicy,
        plan: ModelPlan,
        units: Sequence[Unit],
        streams: CommStreams,
        pool: BufferPool,
    ) -> None:
        self.meshes, self.policy, self.plan, self.pool = meshes, policy, plan, pool
        self.units, self.root = list(units), units[-1]
        self.groups: list[ParamGroup] = [group for unit in units for group in unit.groups]
        self.is_last_micro_batch = True
        self.wants_scaler = any(g.plan.requires_grad and g.plan.dtype == torch.float16 for g in self.groups)
        """Weights are trained in float16, and nobody has said yet what the loss was scaled with."""
        self.streams = streams
        self.grad_hooks: OrderedDict[int, tuple[ShardedTensor, Callable[[torch.Tensor], None]]] = (
            OrderedDict()
        )
        """Called for parameters whose gradients are complete
        (:meth:`~fsdmoe.fsdp.sharded_tensor.ShardedTensor.register_post_accumulate_grad_hook`)."""
        self._forward_orders = {True: RunOrder(), False: RunOrder()}
        self._backward_order = RunOrder()
        self._depth = 0
        self._task: int | None = None
        self._in_backward: list[Unit] = []
        self._accumulates = True
        """The backward under way computes gradients of parameters."""
        self._stale: set[Unit] = set()
        """Units whose weights were written after the last forward began."""
        self._released: ReleasedMemory | None = None
        self._guard = SlotGuard(units) if policy.fsdp.debug else None
        self._num_forwards = 0
        for group in self.groups:
            group.weights.guard.engine = weakref.ref(self)
        self._remember_modules()
        self._follow_registrations()
        self._install_hooks()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a fully sharded model cannot be copied: its parameters are views of shared buffers; build the "
            "model a second time, shard it and load a checkpoint into it"
        )

    # What users call

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: whether the step's gradient is complete after it.

        Without it every backward counts as the last; gradients then still add up, but replicas (``dp_outer``)
        are summed over after each. Backward runs on the calling thread: a process has one device, and handing
        over to a thread of its own costs the host more than it gains.
        """
        before, self.is_last_micro_batch = self.is_last_micro_batch, last
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
            # A last backward that reaches no trained parameter leaves what earlier ones made to this place;
            # one that raised has not ended.
            has_ended = self._task is None and not self._depth
            if last and has_ended and any(unit.grads.is_partial for unit in self.units):
                self._end_micro_batch(is_last=True)
        finally:
            self.is_last_micro_batch = before

    def zero_grad(self) -> None:
        """Drop all gradients: the next backward starts from nothing."""
        self._recover_outside_backward()
        for unit in self.units:
            unit.grads.drop()

    def mark_changed(self) -> None:
        """For code that wrote main weights as raw memory: the next forward takes them up. On every rank."""
        for group in self.groups:
            group.weights.mark_changed()

    def release(self, *optimizers: torch.optim.Optimizer, keep: Keep = "host") -> int:
        """Between two steps: give back the memory of weights, gradients, buffers and the optimizers' states,
        and keep their values in host memory, or nowhere. Returns the number of bytes; on every rank."""
        self._require_memory()
        if self._depth or is_in_backward():
            raise RuntimeError("release: expected to be called between steps, got a forward or backward")
        self._recover()
        self.streams.block()
        self._released = ReleasedMemory(self.units, self.pool, optimizers, keep)
        return self._released.num_bytes

    def restore(self) -> None:
        """Take the memory again, with the values it had, or zeros where they were not kept."""
        released, self._released = self._released, None
        if released is not None:
            released.give_back()
            self.mark_changed()

    def _require_memory(self) -> None:
        if self._released is not None:
            raise RuntimeError(f"fsdp: {PROBLEM}")

    def unshard(self, unit: Unit) -> None:
        """Start gathering a unit ahead of its forward; ``unit.hold()`` waits, and shows its whole weights."""
        if self._depth == 0 and not is_in_backward():
            self.begin_forward()
        unit.issue(evict_pinned=False)

    def run(self, unit: Unit, method: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a method of a unit's module as its forward is run."""
        output = None
        self.pre_forward(unit)
        try:
            output = method(*args, **kwargs)
        finally:
            self.post_forward(unit, (args, kwargs), output)
        return output

    def held_bytes(self) -> dict[str, int]:
        """What this rank holds, by kind; the optimizer's state and activations come on top."""
        plan = memory_of(self.plan, self.meshes, self.policy, lambda groups, at: MomentBytes(0))
        return {
            "weights": plan.weights,
            "main weights": plan.main_weights,
            "gradients": plan.gradients,
            "gathered weights": plan.gather_slots,
            "whole gradients": plan.grad_slots,
        }

    def require_complete_gradients(self) -> None:
        """Raise if the last micro-batch has not run yet, or a backward raised."""
        self._require_memory()
        self._recover_outside_backward()
        for unit in self.units:
            unit.grads.require_complete()

    # Forward

    def _install_hooks(self) -> None:
        for unit in self.units:
            if unit.groups or unit.is_root:
                hook = torch._dynamo.disable(self._pre_forward_hook(unit))
                unit.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
                hook = torch._dynamo.disable(self._post_forward_hook(unit))
                unit.module.register_forward_hook(hook, with_kwargs=True, always_call=True)

    def _remember_modules(self) -> None:
        modules = list(self.root.module.modules())
        self._modules = {id(module) for module in modules}
        self._has_new_modules = False
        """Something was registered in one of them since the last look."""
        lists = [module for module in modules if isinstance(module, (nn.ModuleList, nn.Sequential))]
        self._lists = [(module, list(module._modules.values())) for module in lists]
        """What they hold: ``insert`` registers nothing."""

    def _follow_registrations(self) -> None:
        this = weakref.ref(self)

        def note(module: nn.Module, name: str, added: object) -> None:
            engine = this()
            if engine is not None and id(module) in engine._modules:
                engine._has_new_modules = True

        weakref.finalize(self, torch_hooks.register_module_module_registration_hook(note).remove)
        weakref.finalize(self, torch_hooks.register_module_parameter_registration_hook(note).remove)

    def _look_for_new_parameters(self) -> None:
        known = {(id(module), name) for unit in self.units for module, name, _ in unit.places}
        refuse_new_parameters(self.root.module, known)
        self._remember_modules()

    def _pre_forward_hook(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.pre_forward(unit)

        return hook

    def _post_forward_hook(self, unit: Unit) -> Callable[..., Any]:
        name = self.policy.precision.output_dtype
        cast_to = torch_dtype(name) if unit.is_root and name is not None else None

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.post_forward(unit, (args, kwargs), output)
            return output if cast_to is None else cast_floats(output, cast_to)

        return hook

    def pre_forward(self, unit: Unit) -> None:
        """The unit's module, or what stands for it, is about to compute; :meth:`post_forward` must follow."""
        recomputing = is_in_backward()
        if recomputing:
            self._refuse_reentrant(unit)
            following = None
        else:
            if unit.is_root or self._depth == 0:
                self.begin_forward()
            records = torch.is_grad_enabled()
            unit.ran_with_grad |= records
            following = self._forward_orders[records].advance(unit)
        unit.issue(evict_pinned=True)
        unit.is_held = False
        unit.depth += 1
        self._depth += 1
        if following is not None and self.policy.fsdp.prefetch:
            following.issue(evict_pinned=False)
        unit.make_ready()
        unit.to_unsharded()
        if unit.is_root and self._guard is not None:
            self._guard.enter()

    def post_forward(self, unit: Unit, inputs: Any, output: Any) -> None:
        """It has computed ``output``, whose first gradient begins the unit's backward."""
        if unit.depth == 0:
            return  # forward was never entered: the pre-hook itself raised
        unit.depth -= 1
        self._depth -= 1
        if unit.is_root and self._guard is not None:
            self._guard.leave()
        if not unit.pinned:
            unit.to_sharded()
        if torch.is_grad_enabled() and not is_in_backward():
            self._hook_outputs(unit, inputs, output)
        unit.release()
        if self._depth == 0 and self.policy.fsdp.cpu_offload:
            self.streams.gather.block()  # the host may write weights next, while copies still read them

    def _hook_outputs(self, unit: Unit, inputs: Any, output: Any) -> None:
        """Register a hook for the first gradient of an output; an input that is returned as it is does not
        count as this unit's."""
        passed = {id(tensor) for tensor in tensors_of(inputs)}
        tasks_seen: set[int] = set()
        epoch = unit.weights_epoch

        def pre_backward(gradient: torch.Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task not in tasks_seen:
                if not tasks_seen:
                    unit.num_awaited_backwards -= 1
                tasks_seen.add(task)
                self._pre_backward(unit, task, epoch)

        hooked = False
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None and id(tensor) not in passed:
                tensor.register_hook(pre_backward)
                hooked = True
        unit.num_awaited_backwards += hooked

    def begin_forward(self) -> None:
        """The outermost forward: take up changes of the weights since the last one."""
        self._require_memory()
        self._recover()
        is_new = any(list(module._modules.values()) != held for module, held in self._lists)
        if is_new or self._has_new_modules or self._num_forwards % _FORWARDS_PER_LOOK == 0:
            self._look_for_new_parameters()
        self._num_forwards += 1
        if self.policy.fsdp.cpu_offload:
            self.streams.gather.block()  # shards in host memory are about to be rewritten by the host
        for unit in self.units:  # all of them first: a change taken up by a forward that is refused is lost
            if not unit.is_held:
                unit.check_parameters()
        changed = False
        for unit in self.units:
            if self.policy.fsdp.lean:
                unit.grads.release_memory()
            changed |= unit.refresh()
        if changed:  # all of them: a rank that holds nothing of a parameter must decide as the others do
            for unit in self.units:
                unit.evict()
            raise_noted()  # here an optimizer's step is over: no rank waits for this one in the middle of it
        self.streams.gather.follow()
        for order in self._forward_orders.values():
            order.restart()

    def _refuse_reentrant(self, unit: Unit) -> None:
        unseen = not unit.ran_with_grad and not unit.in_backward and unit.num_awaited_backwards == 0
        if torch.is_grad_enabled() and unseen:
            raise RuntimeError(
                f"{unit.name} runs again in backward, but ran without gradients in forward: re-entrant "
                "checkpointing is not supported; pass use_reentrant=False to torch.utils.checkpoint"
            )

    # Backward

    def _pre_backward(self, unit: Unit, task: int, epoch: int) -> None:
        if self._task != task:
            self._begin_backward(unit, task)
        if unit.gathers_in_backward and (unit.weights_epoch != epoch or unit in self._stale):
            raise RuntimeError(
                f"weights of {unit.name} were written after the forward whose backward runs now (an "
                "optimizer step, a load, an in-place operation): its gradient would mix old and new weights; "
                "run backward before weights change, or forward again after"
            )
        for other in self._in_backward[:]:
            # the root may return a unit's own output: then one gradient is the first of both
            if other is not unit and not other.is_root and not unit.is_root:
                self._finish(other)
        following = self._backward_order.advance(unit)
        if unit.gathers_in_backward:
            unit.issue(evict_pinned=True)
        if not unit.in_backward:
            unit.in_backward = True
            unit.to_unsharded()  # a checkpoint inside the module's forward runs it again without its hooks
            self._in_backward.append(unit)
        if following is not None and self.policy.fsdp.prefetch and following.gathers_in_backward:
            following.issue(evict_pinned=False)
        if unit.gathers_in_backward:
            unit.make_ready()
        if not self._accumulates:
            unit.grads.discard()
        elif unit.grads.param_grads:
            unit.grads.open()

    def _begin_backward(self, unit: Unit, task: int) -> None:
        if self._task is not None:
            self._recover()
        self._task = task
        self._accumulates = accumulates_any((unit, *self.units))
        self._stale = {unit for unit in self.units if unit.has_changed}
        self._backward_order.restart()
        at_end = functools.partial(self._end_backward)
        # Autograd calls it at the end, and drops it uncalled where a backward raised.
        weakref.finalize(at_end, self._note_interruption, task).atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def _finish(self, unit: Unit) -> None:
        self._in_backward.remove(unit)
        unit.in_backward = False
        unit.to_sharded()
        unit.release()
        if not self._accumulates:
            return  # what an earlier micro-batch left open stays so
        if unit.grads.is_open and (self.is_last_micro_batch or not self.policy.keeps_grads):
            if self._guard is not None:
                check_whole_gradients(unit.grads, self.meshes.group(Axis.TP))
            unit.grads.reduce(last=self.is_last_micro_batch)

    def _end_backward(self) -> None:
        for unit in self._in_backward[:]:
            self._finish(unit)
        self._end_micro_batch(is_last=self._accumulates and self.is_last_micro_batch)

    def _end_micro_batch(self, *, is_last: bool) -> None:
        """Wait for its gradients; those of the step are complete after the last."""
        if is_last:
            for unit in self.units:
                unit.grads.finalize()
        self.streams.reduce.drain()
        if self.policy.fsdp.cpu_offload:
            self.streams.gather.block()
            self.streams.reduce.block()  # the host steps on what arrives in its memory
        for unit in self.units:
            unit.grads.settle()
        self._task = None
        if self.grad_hooks and is_last:
            for parameter, hook in [*self.grad_hooks.values()]:  # a hook may remove itself
                if parameter.grad is not None:
                    hook(parameter)

    def _note_interruption(self, task: int) -> None:
        """Backward is over; if it is still the one under way, it raised. :meth:`_recover` does the rest, but
        ``model.zero_grad()`` may come before it and must find the parameters that hold the gradients."""
        if self._task == task:
            for unit in self._in_backward:
                unit.to_sharded()

    def _recover_outside_backward(self) -> None:
        if self._task is not None and not is_in_backward():
            self._recover()

    def _recover(self) -> None:
        """After an exception in forward or backward: no unit computes, nothing is half gathered or half
        written."""
        if self._task is not None:
            self._task = None
            self.streams.reduce.drain()
            if self.policy.fsdp.cpu_offload:
                self.streams.reduce.block()  # before the host writes what copies may still land in
            for unit in self._in_backward:
                unit.in_backward = False
                unit.to_sharded()
            self._in_backward.clear()
            for unit in self.units:
                unit.grads.interrupt() if self._accumulates else unit.grads.settle()
        if self._depth:
            for unit in self.units:
                if unit.depth:
                    unit.depth = 0
                    unit.to_sharded()
            self._depth = 0
        if self._guard is not None:
            self._guard.leave()


def engine_of(model: nn.Module) -> Engine:
    """The engine of a fully sharded model.

    Its ``micro_batch(last=...)`` surrounds the forward and backward of one micro-batch.

    Args:
        model: What ``fully_shard`` or ``parallelize`` returned, not a module inside it.

    Raises:
        AssertionError: The model is not sharded.
    """
    engine = getattr(model, ENGINE, None)
    if engine is None:
        raise AssertionError(
            f"expected a fully sharded model, got {type(model).__name__}: pass the model itself, after "
            "fsdmoe.parallelize (or fully_shard)"
        )
    return engine


def engine_of_parameters(parameters: Sequence[torch.Tensor]) -> Engine:
    """The engine whose parameters these are.

    Raises:
        ConfigError: They are not all parameters of one fully sharded model.
    """
    found = {p.access.engine if isinstance(p, ShardedTensor) else None for p in parameters}
    engine = found.pop() if len(found) == 1 else None
    if engine is None:
        raise ConfigError(
            f"optim: expected parameters of one fully sharded model, got {len(parameters)} others; take "
            "model.parameters() after fsdmoe.parallelize (or fully_shard)"
        )
    return engine
