"""One group of a unit: its flat buffers, and the parameters that are views of them.

::

    main       fp32   [slice]           what the optimizer steps on; the user's parameters are pieces of it
    shard      bf16   [slice]           the same in compute precision: the input of the all-gather
    full       bf16   [slice x ranks]   in a slot: the output of the all-gather; modules compute with views
    full_grad  fp32   [slice x ranks]   in a slot: gradients are written into views of it
    main_grad  fp32   [slice]           the output of the reduce-scatter; what the optimizer reads

Over a single rank nothing travels: ``full`` is ``shard`` and ``full_grad`` is ``main_grad``. In pure fp32
``shard`` is ``main``. With ``fsdp.lean`` there is no ``shard`` (gathering casts ``main``), and ``main_grad``
exists only from a backward to the forward after its step. The gradient is in one of three states:

=========  ======================================================  ==========================================
EMPTY      none since ``zero_grad``                                overwritten by the next reduction
PARTIAL    summed over the shard axis only, not yet divided        more micro-batches are added to it
FINAL      summed over replicas as well, and divided               what the optimizer reads
=========  ======================================================  ==========================================

Adding to a FINAL gradient makes it PARTIAL again first: times the divisor, over the number of replicas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.compat import all_gather
from fsdmoe.fsdp.buffer import BufferPool
from fsdmoe.fsdp.collectives import Stage, all_reduce
from fsdmoe.fsdp.config import FSDPPolicy
from fsdmoe.fsdp.exchange import exchange_stages, local
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.layout import OwnedRange, Segment
from fsdmoe.fsdp.plan import GroupPlan, ParamPlan
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.fsdp.units import OwnedParameter
from fsdmoe.mesh import Meshes


class GradState(Enum):
    EMPTY = auto()
    PARTIAL = auto()
    FINAL = auto()


@dataclass(frozen=True)
class GroupContext:
    """What all groups of an engine share."""

    meshes: Meshes
    policy: FSDPPolicy
    pool: BufferPool
    shard_device: torch.device
    """Where slices live: the compute device, or the host with ``cpu_offload``."""
    grad_divisor: float
    scratch: Callable[[int, torch.dtype], torch.Tensor]
    """A buffer for a reduction's output, valid until the reduce lane runs the next one."""


class ParamGroup:
    """The flat buffers of one group and what happens to them."""

    def __init__(self, plan: GroupPlan, owned: list[OwnedParameter], context: GroupContext) -> None:
        self.plan, self.context = plan, context
        self.layout = plan.layout
        self.grad_state = GradState.EMPTY
        self.grads_open = False
        self.refuse_gradient: Callable[[str], None]
        """Raises: a gradient came while the unit was not in backward. Set by the unit."""
        self.can_stage: Callable[[], bool]
        """Whether forward may leave gradients in their places. Set by the unit."""
        by_name = {o.name: o for o in owned}
        self.params = [FlatParam(by_name[p.name], self) for p in plan.params]
        self._allocate()
        self._own = slice(0, 0)
        self.full_grad: torch.Tensor | None = None
        self._gaps: list[torch.Tensor] = []
        self._exchanges: dict[bool, list[Stage]] = {}
        self._seen_version = self._cast_version = -1
        self._num_changes = 0
        self._shown = False
        self._bind_shards()
        if not self._lends:
            self.take_grad_memory()

    # Building

    def _allocate(self) -> None:
        plan, context, policy = self.plan, self.context, self.context.policy
        zeros = partial(context.pool.zeros, device=context.shard_device)
        main_dtype = plan.main_dtype(policy)
        self.main = zeros(self.layout.slice_numel, main_dtype)
        if main_dtype == plan.dtype:
            self.shard: torch.Tensor | None = self.main
        elif plan.gathered and policy.fsdp.lean:
            self.shard = None
        else:
            self.shard = zeros(self.layout.slice_numel, plan.dtype)
        self.main_grad: torch.Tensor | None = None
        self._lends = policy.fsdp.lean and context.shard_device == context.pool.device

    def _bind_shards(self) -> None:
        """The face of every parameter: pieces of the main weights and gradients, with global shapes."""
        meshes, plan = self.context.meshes, self.plan
        owned = self.layout.owned(meshes.rank(plan.axis))
        for param, spec, piece in zip(self.params, plan.params, owned, strict=True):
            held = slice(piece.offset, piece.offset + piece.numel)
            face = ShardedTensor(self.main[held], spec.placement, piece.start, piece.end, meshes, plan.axis)
            param.sharded = nn.Parameter(face, requires_grad=plan.requires_grad)
            param.piece = param.sharded.piece  # type: ignore[attr-defined]

    def bind_full(self, full: torch.Tensor, full_grad: torch.Tensor | None) -> None:
        """Give every parameter its place in the gathered buffers, for life; ``full_grad`` is None where
        nothing is reduced.

        A weight that autograd saved is a view of this memory, so a parameter must never move. ``.data``
        gives it a version counter of its own: a gather is not a modification in autograd's eyes."""
        rank, numel = self.context.meshes.rank(self.plan.axis), self.layout.slice_numel
        self.full = full
        if full_grad is not None:
            self._bind_full_grad(full_grad)
        self._own = slice(rank * numel, (rank + 1) * numel)
        for param, spec, segment in zip(self.params, self.plan.params, self.layout.segments, strict=True):
            original = param.places[0][0]._parameters[param.places[0][1]]
            param.full = nn.Parameter(
                torch.empty(0, dtype=full.dtype, device=full.device), requires_grad=self.plan.requires_grad
            )
            param.full.__dict__.update(getattr(original, "__dict__", {}))
            param.full.data = _view(full, segment, spec)
            if self.plan.requires_grad:
                param.full.grad_sink = param  # type: ignore[attr-defined]
                # Autograd keeps hooks where the garbage collector cannot look: a strong one never dies.
                take = weakref.WeakMethod(param.take_gradient)
                param.full.register_post_accumulate_grad_hook(partial(_call, take))

    def _bind_full_grad(self, flat: torch.Tensor) -> None:
        self.full_grad = flat
        self._gaps = [flat[start:end] for start, end in self.layout.padding_ranges()]
        for param, spec, segment in zip(self.params, self.plan.params, self.layout.segments, strict=True):
            param.grad_view = _view(flat, segment, spec)

    def _bind_main_grad(self, flat: torch.Tensor) -> None:
        self.main_grad = flat
        self._exchanges.clear()
        owned = self.layout.owned(self.context.meshes.rank(self.plan.axis))
        for param, piece in zip(self.params, owned, strict=True):
            held = flat[piece.offset : piece.offset + piece.numel]
            param.grad_face = param.sharded.with_piece(held)  # type: ignore[attr-defined]
        if not self.plan.reduced:
            self._bind_full_grad(flat)
            self.zero_padding()

    def fill(self, param: FlatParam, value: torch.Tensor) -> None:
        """Take this rank's elements of a whole local tensor."""
        owned = self.owned_range(param)
        self.main[owned.offset : owned.offset + owned.numel].copy_(value.reshape(-1)[owned.start : owned.end])

    def owned_range(self, param: FlatParam) -> OwnedRange:
        rank = self.context.meshes.rank(self.plan.axis)
        return self.layout.owned(rank)[self.params.index(param)]

    # Weights

    def version(self) -> int:
        """Grows whenever main weights change, through the flat buffer or through a parameter's face."""
        faces = sum(param.sharded._version + param.sharded.num_writes for param in self.params)  # type: ignore[attr-defined]
        return self.main._version + faces + self._num_changes

    def mark_changed(self, *, cast: bool = False) -> None:
        """For an optimizer that writes ``main`` itself: call on every rank, also where a rank's part is
        empty. With ``cast`` it writes ``shard`` too, so the next refresh need not."""
        is_current = self.version() == self._seen_version
        self._num_changes += 1
        if cast and is_current:
            self._cast_version = self.version()

    def refresh(self) -> bool:
        """Bring the compute-precision shard up to date; whether anything had changed."""
        version = self.version()
        if version == self._seen_version:
            return False
        self._seen_version = version
        if self.shard is not None and self.shard is not self.main and version != self._cast_version:
            self.shard.copy_(self.main)
        return True

    def gather_stages(self) -> list[Stage]:
        """From the shard to ``full``: straight, or by way of this rank's slice of it."""
        if not self.plan.gathered:
            return []
        source = self.main if self.shard is None else self.shard
        own, stages = source, []
        if source.device != self.full.device or source.dtype != self.full.dtype:
            own = self.full[self._own]
            stages.append(local(partial(own.copy_, source, non_blocking=True)))
        if self.layout.num_ranks > 1:
            stages.append(partial(all_gather, self.full, own, self.process_group))
        elif own is source:
            stages.append(local(partial(self.full.copy_, source, non_blocking=True)))
        return stages

    # Gradients

    def take_grad_memory(self) -> None:
        """Have a main gradient that can be written."""
        if self.main_grad is not None or not self.plan.requires_grad:
            return
        numel, dtype = self.layout.slice_numel, self.plan.main_dtype(self.context.policy)
        if self._lends:  # ordinary memory, which activations use in between
            self._bind_main_grad(torch.empty(numel, dtype=dtype, device=self.context.shard_device))
        else:
            self._bind_main_grad(self.context.pool.zeros(numel, dtype, self.context.shard_device))

    def lend_grad_memory(self) -> None:
        """Let go of the main gradient if it may be lent and holds nothing. Whoever still looks at an old
        gradient keeps it alive."""
        if not self._lends or self.main_grad is None or self.grads_open or self.has_grad:
            return
        if not self.plan.reduced:
            if any(param.is_staged for param in self.params):
                return
            self.full_grad, self._gaps = None, []
            for param in self.params:
                param.grad_view = None
        self.notice_dropped()
        self.main_grad = None
        self._exchanges.clear()
        for param in self.params:
            param.grad_face = None

    def open_grads(self) -> None:
        """Backward is about to write gradients; a user who dropped ``.grad`` wants them to start from
        nothing."""
        self.take_grad_memory()
        self.notice_dropped()
        if self.grads_open:
            return
        self.grads_open = True
        if self.plan.reduced or self.grad_state is GradState.EMPTY:
            for param in self.params:
                param.written = False
        elif self.grad_state is GradState.FINAL:
            self._make_partial()

    def reduce_stages(self, *, last: bool) -> list[Stage]:
        """Close the gradients of this backward and add them to ``main_grad``; finish it with the last
        micro-batch."""
        assert self.main_grad is not None
        self.grads_open = False
        for param in self.params:
            if not param.written and param.grad_view is not None:
                param.make_room()
                param.grad_view.zero_()
        stages: list[Stage] = []
        if self.plan.reduced:
            if self.grad_state is GradState.FINAL:
                stages.append(local(self._make_partial))
            stages += self._exchange(first=self.grad_state is GradState.EMPTY)
        self.grad_state = GradState.PARTIAL
        return stages + (self.final_stages() if last else [])

    def _exchange(self, *, first: bool) -> list[Stage]:
        if first not in self._exchanges:
            self._exchanges[first] = exchange_stages(self, first=first)
        return self._exchanges[first]

    def final_stages(self) -> list[Stage]:
        """From PARTIAL to FINAL: sum over replicas, divide."""
        assert self.main_grad is not None
        stages: list[Stage] = []
        if self._num_replicas() > 1:
            group = self.context.meshes.group(self.plan.outer_axis)
            stages.append(partial(all_reduce, self.main_grad, group))
        if self.context.grad_divisor != 1:
            stages.append(local(partial(self.main_grad.mul_, 1 / self.context.grad_divisor)))
        self.grad_state = GradState.FINAL
        return stages

    def show_grads(self) -> None:
        """Let the user see the gradients, unless they do already, or dropped what no backward added to."""
        self.notice_dropped()
        if self.grad_state is not GradState.EMPTY and self.params[0].sharded.grad is None:
            self._shown = True
            for param in self.params:
                param.sharded.grad = param.grad_face

    def zero_padding(self) -> None:
        """Another unit's gradients may lie in the gaps; a norm over the flat gradient must not see them."""
        if self.full_grad is not None and self._gaps:
            torch._foreach_zero_(self._gaps)

    def zero_grad(self) -> None:
        self._shown, self.grad_state = False, GradState.EMPTY
        for param in self.params:
            param.sharded.grad = None

    def notice_dropped(self) -> None:
        """A user may set gradients to ``None`` without telling anybody."""
        if self._is_dropped:
            self._shown, self.grad_state = False, GradState.EMPTY

    def _make_partial(self) -> None:
        factor = self.context.grad_divisor / self._num_replicas()
        if factor != 1:
            self.main_grad.mul_(factor)  # type: ignore[union-attr]

    def _num_replicas(self) -> int:
        return self.context.meshes.size(self.plan.outer_axis)

    @property
    def has_grad(self) -> bool:
        """There is a gradient to step with: some backward reached the unit, and nobody dropped it since."""
        return self.grad_state is not GradState.EMPTY and not self._is_dropped

    @property
    def _is_dropped(self) -> bool:
        """The user saw the gradient and set it to ``None``."""
        return self._shown and self.params[0].sharded.grad is None

    @property
    def is_partial(self) -> bool:
        return self.grad_state is GradState.PARTIAL

    @property
    def layout_key(self) -> object:
        """Equal for groups whose gradients and gaps lie in the same places of a slot."""
        return tuple((s.start, s.numel) for s in self.layout.segments), self.layout.numel

    @property
    def exchange_spoils_padding(self) -> bool:
        return self.plan.reduced and self.context.policy.fsdp.grad_exchange == "bf16_all_to_all"

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.context.meshes.group(self.plan.axis)


def _call(method: weakref.WeakMethod[Any], parameter: torch.Tensor) -> None:
    alive = method()
    if alive is not None:
        alive(parameter)


def _view(flat: torch.Tensor, segment: Segment, spec: ParamPlan) -> torch.Tensor:
    return flat[segment.start : segment.end].view(spec.local_shape)
