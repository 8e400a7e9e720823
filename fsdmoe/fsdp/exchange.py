"""How gradients of all ranks become the sum in one rank's slice: stages over tensors and process groups.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fsdmoe.fsdp.buffer import Scratch
from fsdmoe.fsdp.collectives import Stage, all_reduce, all_to_all, local, reduce_scatter

_FIRST_CAST = 1 << 20  # elements cast by way of a temporary; after them, source and target no longer overlap


@dataclass(frozen=True)
class Reduction:
    """One group's way from whole gradients on every rank to the main gradient."""

    main: torch.Tensor
    full: torch.Tensor
    """``main`` itself where one rank holds everything and nothing is offloaded."""
    shard_group: dist.ProcessGroup | None
    """None where the group is sharded over one rank."""
    replica_group: dist.ProcessGroup | None
    divisor: float
    in_bf16: bool
    """Exchange by ``bf16_all_to_all``."""
    scratch: Scratch

    def add(self, factor: float | None, *, finish: bool) -> list[Stage]:
        """``main = factor * main + sum of full`` (``None``: without the old ``main``), then :meth:`finish`
        if asked."""
        if self.full is self.main:  # backward wrote it there already
            return self.finish() if finish else []
        if self._on_device:
            stages = self._add_on_device(factor)
            return stages + (self._finish(self.main) if finish else [])
        stages, work = self._add_beside(factor)
        return [*stages, *(self._finish(work) if finish else []), _copy(self.main, work)]

    def finish(self) -> list[Stage]:
        """Sum what ``main`` holds over replicas, and divide."""
        if self._on_device:
            return self._finish(self.main)
        work = self._slice("work", self.main.dtype)
        return [_copy(work, self.main), *self._finish(work), _copy(self.main, work)]

    def _add_on_device(self, factor: float | None) -> list[Stage]:
        if factor is None and self.full.dtype == self.main.dtype and self.shard_group is not None:
            return self._sum_over_shards(self.main)
        if self.shard_group is None:
            total, stages = self.full, []
        else:
            total = self._slice("sum", self.full.dtype)
            stages = self._sum_over_shards(total)
        if factor is None:
            return [*stages, _copy(self.main, total)]
        if factor != 1:
            stages.append(local(partial(self.main.mul_, factor)))
        return [*stages, local(partial(self.main.add_, total))]

    def _add_beside(self, factor: float | None) -> tuple[list[Stage], torch.Tensor]:
        work, stages = self._slice("work", self.main.dtype), []
        if self.shard_group is None:
            stages.append(_copy(work, self.full))
        elif self.full.dtype == work.dtype:
            stages += self._sum_over_shards(work)
        else:
            total = self._slice("sum", self.full.dtype)
            stages += [*self._sum_over_shards(total), _copy(work, total)]
        if factor is not None:
            before = self._slice("before", self.main.dtype)
            stages += [_copy(before, self.main), local(partial(work.add_, before, alpha=factor))]
        return stages, work

    def _sum_over_shards(self, out: torch.Tensor) -> list[Stage]:
        full, group = self.full, self.shard_group
        assert group is not None
        if not self.in_bf16:
            return [partial(reduce_scatter, out, full, group)]
        received_RS = full.view(torch.bfloat16)[full.numel() :].view(group.size(), -1)
        return [
            local(partial(cast_in_place, full, self.scratch("cast", _FIRST_CAST, torch.bfloat16))),
            partial(_exchange_halves, full, group),
            local(partial(torch.sum, received_RS, 0, dtype=torch.float32, out=out)),
        ]

    def _finish(self, work: torch.Tensor) -> list[Stage]:
        stages: list[Stage] = []
        if self.replica_group is not None:
            stages.append(partial(all_reduce, work, self.replica_group))
        if self.divisor != 1:
            stages.append(local(partial(work.mul_, 1 / self.divisor)))
        return stages

    @property
    def _on_device(self) -> bool:
        return self.main.device == self.full.device

    def _slice(self, use: str, dtype: torch.dtype) -> torch.Tensor:
        return self.scratch.slice(use, self.main.numel(), dtype)


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


def _exchange_halves(full: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
    halves = full.view(torch.bfloat16)
    return all_to_all(halves[full.numel() :], halves[: full.numel()], group, async_op)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Stage:
    return local(partial(target.copy_, source, non_blocking=True))
