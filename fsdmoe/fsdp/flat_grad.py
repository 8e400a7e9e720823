"""The flat gradient tensors of one group, and the stages that reduce them.

It keeps no state: :class:`fsdmoe.fsdp.grads.GradBuffer` alone decides when they are written and read.
"""

from __future__ import annotations

import torch

from fsdmoe.fsdp.collectives import Stage
from fsdmoe.fsdp.context import GroupContext
from fsdmoe.fsdp.exchange import Reduction
from fsdmoe.fsdp.plan import GroupPlan


class FlatGrad:
    """``full``: whole gradients of this rank's tokens. ``main``: this rank's slice of the sum."""

    def __init__(self, plan: GroupPlan, full: torch.Tensor | None, context: GroupContext) -> None:
        """``full`` lies in a slot; None where backward writes ``main`` itself."""
        self.plan = plan
        self.context = context
        self.full = full
        self.main: torch.Tensor | None = None
        self.main_dtype = plan.grad_dtype(context.policy)
        self.full_dtype = context.policy.reduce_dtype if plan.reduced else self.main_dtype
        self.has_own_full = plan.reduced
        """``full`` is memory of its own, in a slot."""
        self.divisor = context.grad_divisor
        """What sums over ranks are divided by."""
        self.is_lean = context.policy.fsdp.lean and context.shard_device == context.pool.device
        """``main`` exists only from a backward to the forward after its step."""
        layout = plan.layout
        self.layout_key: object = tuple((s.start, s.numel) for s in layout.segments), layout.numel
        """Equal for groups whose gradients and gaps lie in the same places of a slot."""
        self._gaps = [] if full is None else self._gaps_of(full)
        self._stages: dict[tuple[float | None, bool] | None, list[Stage]] = {}

    @property
    def partial_factor(self) -> float:
        """Takes a finished gradient back to one that more can be added to: every replica holds the whole."""
        return self.divisor / self.context.meshes.size(self.plan.outer_axis)

    def set_divisor(self, divisor: float) -> None:
        """Divide sums by another number from now on; there must be no gradient."""
        self.divisor = divisor
        self._stages.clear()

    @property
    def exchange_spoils_padding(self) -> bool:
        return self.has_own_full and self._in_bf16

    def allocate(self) -> None:
        """Have a ``main``."""
        context, numel = self.context, self.plan.layout.slice_numel
        if self.is_lean:  # ordinary memory, which activations use in between
            self.main = torch.empty(numel, dtype=self.main_dtype, device=context.shard_device)
        else:
            self.main = context.pool.zeros(numel, self.main_dtype, context.shard_device)
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
        """Reduce ``full`` into ``factor * main``, or over it if ``factor`` is None."""
        key = factor, finish
        if key not in self._stages:
            self._stages[key] = self._reduction().add(factor, finish=finish)
        return self._stages[key]

    def finish(self) -> list[Stage]:
        """Sum ``main`` over replicas and divide it."""
        if None not in self._stages:
            self._stages[None] = self._reduction().finish()
        return self._stages[None]

    def _reduction(self) -> Reduction:
        plan, context = self.plan, self.context
        meshes = context.meshes
        assert self.main is not None
        assert self.full is not None
        return Reduction(
            main=self.main,
            full=self.full,
            shard_group=meshes.group(plan.axis) if plan.layout.num_ranks > 1 else None,
            replica_group=meshes.group(plan.outer_axis) if meshes.size(plan.outer_axis) > 1 else None,
            divisor=self.divisor,
            in_bf16=self._in_bf16,
            scratch=context.scratch,
        )

    @property
    def _in_bf16(self) -> bool:
        return self.context.policy.fsdp.grad_exchange == "bf16_all_to_all"
