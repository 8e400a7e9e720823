"""One group's gradient in flat tensors, and how those of all ranks become the sum in one rank's slice.

``reduce_scatter`` writes straight into the main gradient when it is the first of the step, else by way of a
scratch slice. ``bf16_all_to_all`` halves the traffic and still sums in float32 (MegaScale-MoE, section 5),
in the float32 gradient buffer itself but for a temporary of 2 MiB::

    before   | g0 g1 g2 g3 g4 g5 g6 g7 |         float32, one slot
    cast     | b0..b7     |  (free)    |         rounded to bfloat16, in place, into the first half
    exchange | (sent)     | r0 r1 r2 .. |        every rank's bfloat16 contribution to this rank's slice
    sum      main += r0 + r1 + ...               added up in float32

A main gradient in host memory (``cpu_offload``) is a place to store, never to compute: it is copied to the
device, added to, summed over replicas and divided there, and copied back, all on the reduce stream. A host
operation in between would run before the copy lands.

There are no states here: :class:`fsdmoe.fsdp.grads.GradBuffer` owns the tensors, and alone decides when they
are there, written and read.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from fsdmoe.core.compat import reduce_scatter
from fsdmoe.fsdp.collectives import Stage, local
from fsdmoe.fsdp.context import GroupContext
from fsdmoe.fsdp.plan import GroupPlan

_FIRST_CAST = 1 << 20  # elements cast by way of a temporary; after them, source and target no longer overlap


class FlatGrad:
    """``full``: whole gradients of this rank's tokens. ``main``: this rank's slice of the sum."""

    def __init__(self, plan: GroupPlan, full: torch.Tensor | None, context: GroupContext) -> None:
        """``full`` lies in a slot; None where backward writes ``main`` itself."""
        meshes, policy, layout = context.meshes, context.policy, plan.layout
        self.plan = plan
        self.full = full
        self.main: torch.Tensor | None = None
        self.main_dtype = plan.grad_dtype(policy)
        self.full_dtype = policy.reduce_dtype if plan.reduced else self.main_dtype
        self.has_own_full = plan.reduced
        """``full`` is memory of its own, in a slot."""
        self.is_lean = policy.fsdp.lean and context.shard_device == context.pool.device
        """``main`` exists only from a backward to the forward after its step."""
        self.divisor = context.grad_divisor
        """What sums over ranks are divided by."""
        self.rank = meshes.rank(plan.axis)
        self.layout_key: object = tuple((s.start, s.numel) for s in layout.segments), layout.numel
        """Equal for groups whose gradients and gaps lie in the same places of a slot."""
        self._pool = context.pool
        self._device = context.shard_device
        self._scratch = context.scratch
        self._num_replicas = meshes.size(plan.outer_axis)
        self._shard_group = meshes.group(plan.axis) if layout.num_ranks > 1 else None
        self._replica_group = meshes.group(plan.outer_axis) if self._num_replicas > 1 else None
        self._in_bf16 = policy.fsdp.grad_exchange == "bf16_all_to_all"
        self._gaps = [] if full is None else self._gaps_of(full)
        self._stages: dict[tuple[float | None, bool] | None, list[Stage]] = {}

    @property
    def partial_factor(self) -> float:
        """Takes a finished gradient back to one that more can be added to: every replica holds the whole."""
        return self.divisor / self._num_replicas

    def set_divisor(self, divisor: float) -> None:
        """Divide sums by another number from now on; there must be no gradient."""
        self.divisor = divisor
        self._stages.clear()

    @property
    def exchange_spoils_padding(self) -> bool:
        return self.has_own_full and self._in_bf16

    def allocate(self) -> None:
        """Have a ``main``."""
        numel = self.plan.layout.slice_numel
        if self.is_lean:  # ordinary memory, which activations use in between
            self.main = torch.empty(numel, dtype=self.main_dtype, device=self._device)
        else:
            self.main = self._pool.zeros(numel, self.main_dtype, self._device)
        if not self.has_own_full:
            self.full = self.main
            self._gaps = self._gaps_of(self.main)
            self.zero_padding()

    def free(self) -> None:
        """Release ``main``; tensors that still view it keep it alive."""
        self.main = None
        if not self.has_own_full:
            self.full = None
            self._gaps = []
        self._stages.clear()

    def zero_padding(self) -> None:
        """Another unit's gradients may lie in the gaps; a norm over the flat gradient must not see them."""
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def _gaps_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        return [full[start:end] for start, end in self.plan.layout.padding_ranges()]

    def add(self, factor: float | None, *, finish: bool) -> list[Stage]:
        """``main = factor * main + sum of full`` (``None``: without the old ``main``), then :meth:`finish`
        if asked."""
        key = factor, finish
        if key not in self._stages:
            self._stages[key] = self._add(*self._tensors(), factor, finish=finish)
        return self._stages[key]

    def finish(self) -> list[Stage]:
        """Sum what ``main`` holds over replicas, and divide."""
        if None not in self._stages:
            main, full = self._tensors()
            if main.device == full.device:
                self._stages[None] = self._finish(main)
            else:
                work = self._slice("work", main.dtype)
                self._stages[None] = [_copy(work, main), *self._finish(work), _copy(main, work)]
        return self._stages[None]

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.main is not None
        assert self.full is not None
        return self.main, self.full

    def _add(
        self, main: torch.Tensor, full: torch.Tensor, factor: float | None, *, finish: bool
    ) -> list[Stage]:
        if full is main:  # backward wrote it there already
            return self._finish(main) if finish else []
        work = main
        before: list[Stage] = []
        after: list[Stage] = []
        if main.device != full.device:
            work = self._slice("work", main.dtype)
            before = [] if factor is None else [_copy(work, main)]
            after = [_copy(main, work)]
        ends = self._finish(work) if finish else []
        return [*before, *self._add_on_device(work, full, factor), *ends, *after]

    def _add_on_device(self, work: torch.Tensor, full: torch.Tensor, factor: float | None) -> list[Stage]:
        group = self._shard_group
        if factor is None and full.dtype == work.dtype and group is not None:
            return self._sum_over_shards(work, full, group)
        total = full
        stages: list[Stage] = []
        if group is not None:
            total = self._slice("sum", full.dtype)
            stages += self._sum_over_shards(total, full, group)
        if factor is None:
            return [*stages, _copy(work, total)]
        if factor != 1:
            stages.append(local(partial(work.mul_, factor)))
        return [*stages, local(partial(work.add_, total))]

    def _sum_over_shards(
        self, out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup
    ) -> list[Stage]:
        if not self._in_bf16:
            return [partial(reduce_scatter, out, full, group)]
        received_RS = full.view(torch.bfloat16)[full.numel() :].view(group.size(), -1)
        return [
            local(partial(cast_in_place, full, self._scratch("cast", _FIRST_CAST, torch.bfloat16))),
            partial(_exchange_halves, full, group),
            local(partial(torch.sum, received_RS, 0, dtype=torch.float32, out=out)),
        ]

    def _finish(self, work: torch.Tensor) -> list[Stage]:
        stages: list[Stage] = []
        if self._replica_group is not None:
            stages.append(partial(all_reduce, work, self._replica_group))
        if self.divisor != 1:
            stages.append(local(partial(work.mul_, 1 / self.divisor)))
        return stages

    def _slice(self, use: str, dtype: torch.dtype) -> torch.Tensor:
        return self._scratch.slice(use, self.plan.layout.slice_numel, dtype)


def cast_in_place(full: torch.Tensor, temporary: torch.Tensor) -> torch.Tensor:
    """Round a float32 buffer to bfloat16 inside its own first half; returns that half.

    Element i moves from byte 4i to byte 2i, so a range [a, 2a) lands on bytes that were read already. Only
    the very first range has to go by way of ``temporary``."""
    half = full.view(torch.bfloat16)[: full.numel()]
    done = min(temporary.numel(), full.numel())
    half[:done].copy_(temporary[:done].copy_(full[:done]))
    while done < full.numel():
        end = min(2 * done, full.numel())
        half[done:end].copy_(full[done:end])
        done = end
    return half


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def _exchange_halves(full: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
    halves = full.view(torch.bfloat16)
    sent, received = halves.split(full.numel())
    return dist.all_to_all_single(received, sent, group=group, async_op=async_op)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Stage:
    return local(partial(target.copy_, source, non_blocking=True))
