"""How the keys and values of a document's other chunks come to the queries of a rank.

Three ways, one interface: ``forward`` calls ``attend(block, k, v)`` for every range of keys that this
rank's queries may see; ``backward`` does it again with ``attend_backward(block, k, v)``, which returns that
block's gradients of keys and values, and returns them to the rank that owns the rows.

    Local     the rank has all keys (one rank; or heads were exchanged for tokens before)
    Gather    one all-gather, one call; gradients return by one reduce-scatter
    Ring      keys go round, each step's transfer under the previous step's attention; gradients follow one
    step behind and end at their owners. Four ranks, whose keys each holds (and whose gradients):

                  step      rank 0       rank 1       rank 2       rank 3
                   0        0            1            2            3           own gradients stay
                   1        3 (3)        0 (0)        1 (1)        2 (2)       a new sum begins
                   2        2 (2)        3 (3)        0 (0)        1 (1)       received, added to, sent on
                   3        1 (1)        2 (2)        3 (3)        0 (0)
                  home      (0)          (1)          (2)          (3)

Keys and values are sent together, a row of ``[keys of all heads | values of all heads]`` a token, in their
own dtype; gradients are sent in fp32, since each hop adds to them.

Shape suffixes as in :mod:`fsdmoe.context_parallel.block_attention`; C = G * (D + E) numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdmoe.context_parallel.block_attention import KeyValueGradient
from fsdmoe.context_parallel.blocks import Block
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.core.compat import all_gather, reduce_scatter
from fsdmoe.core.ring_send_recv import RingSendRecv

Attend = Callable[[Block, Tensor, Tensor], None]
AttendBackward = Callable[[Block, Tensor, Tensor], KeyValueGradient]

_KEYS, _GRADIENTS = 0, 1
"""Tags, so that backends that match messages by tag never confuse the two."""


class LocalKVExchange:
    """All keys are here."""

    def __init__(self, block: Block | None) -> None:
        self.block = block

    def forward(self, k_TGD: Tensor, v_TGE: Tensor, attend: Attend) -> None:
        if self.block is not None:
            attend(self.block, k_TGD, v_TGE)

    def backward(
        self, k_TGD: Tensor, v_TGE: Tensor, attend_backward: AttendBackward
    ) -> tuple[Tensor, Tensor]:
        if self.block is None:
            return torch.zeros_like(k_TGD), torch.zeros_like(v_TGE)
        gradient = attend_backward(self.block, k_TGD, v_TGE)
        if gradient.rows is None:
            return gradient.dk_MGD, gradient.dv_MGE
        rows = _Rows(k_TGD, v_TGE)
        dk_TGD, dv_TGE = rows.views(rows.zeros())
        gradient.add_to(dk_TGD, dv_TGE)
        return dk_TGD, dv_TGE


class GatherKVExchange:
    """Every rank gets all keys at once, in forward and again in backward; between them it keeps its own."""

    def __init__(self, plan: AttentionPlan, window: int | None = None) -> None:
        self.plan = plan
        self.block = None if plan.gathered is None else plan.gathered.windowed(window)

    def forward(self, k_TGD: Tensor, v_TGE: Tensor, attend: Attend) -> None:
        gathered = self._gather(_Rows(k_TGD, v_TGE))
        if self.block is not None:
            attend(self.block, *gathered)

    def backward(
        self, k_TGD: Tensor, v_TGE: Tensor, attend_backward: AttendBackward
    ) -> tuple[Tensor, Tensor]:
        rows = _Rows(k_TGD, v_TGE)
        gathered = self._gather(rows)
        total = rows.zeros(self.plan.size)
        if self.block is not None:
            attend_backward(self.block, *gathered).add_to(*rows.views(total))
        own = rows.zeros()
        reduce_scatter(own, total, self.plan.group)
        return rows.views(own)

    def _gather(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        packed = rows.packed()
        everyone = packed.new_empty(self.plan.size * packed.shape[0], packed.shape[1])
        all_gather(everyone, packed, self.plan.group)
        return rows.views(everyone)


class RingKVExchange:
    """Keys pass from rank to rank."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan

    def forward(self, k_TGD: Tensor, v_TGE: Tensor, attend: Attend) -> None:
        rows = _Rows(k_TGD, v_TGE)
        held = rows.packed()
        for step in range(self.plan.size):
            coming = self._pass_on(held, _KEYS) if step < self.plan.size - 1 else None
            block = self.plan.ring[self._source(step)]
            if block is not None:
                attend(block, *rows.views(held))
            if coming is not None:
                held = coming.wait()

    def backward(
        self, k_TGD: Tensor, v_TGE: Tensor, attend_backward: AttendBackward
    ) -> tuple[Tensor, Tensor]:
        rows = _Rows(k_TGD, v_TGE)
        held, own = rows.packed(), rows.zeros()
        coming_sum: RingSendRecv | None = None
        for step in range(self.plan.size):
            coming = self._pass_on(held, _KEYS) if step < self.plan.size - 1 else None
            block = self.plan.ring[self._source(step)]
            gradient = None if block is None else attend_backward(block, *rows.views(held))
            if step == 0:
                total = own
            else:
                total = rows.zeros() if coming_sum is None else coming_sum.wait()
            if gradient is not None:
                gradient.add_to(*rows.views(total))
            if step > 0:
                coming_sum = self._pass_on(total, _GRADIENTS)
            if coming is not None:
                held = coming.wait()
        if coming_sum is not None:
            own += coming_sum.wait()
        return rows.views(own)

    def _source(self, step: int) -> int:
        """The rank whose keys this rank holds at ``step``."""
        return (self.plan.rank - step) % self.plan.size

    def _pass_on(self, rows_TC: Tensor, tag: int) -> RingSendRecv:
        return RingSendRecv(rows_TC, torch.empty_like(rows_TC), self.plan.group, tag=tag)


KVExchange = LocalKVExchange | GatherKVExchange | RingKVExchange


class _Rows:
    """Keys and values of a token side by side in one row, and the way back."""

    def __init__(self, k_TGD: Tensor, v_TGE: Tensor) -> None:
        self.k_TGD, self.v_TGE = k_TGD, v_TGE
        self.widths = [k_TGD.shape[1] * k_TGD.shape[2], v_TGE.shape[1] * v_TGE.shape[2]]

    def packed(self) -> Tensor:
        return torch.cat((self.k_TGD.flatten(1), self.v_TGE.flatten(1)), dim=1)

    def zeros(self, times: int = 1) -> Tensor:
        """Memory for gradients of ``times`` ranks' rows."""
        dtype = torch.promote_types(self.k_TGD.dtype, torch.float32)
        return self.k_TGD.new_zeros(times * self.k_TGD.shape[0], sum(self.widths), dtype=dtype)

    def views(self, rows_SC: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows_SC.split(self.widths, dim=1)
        return k.unflatten(1, self.k_TGD.shape[1:]), v.unflatten(1, self.v_TGE.shape[1:])
