"""The rows of a micro-batch in sub-batches: while those of one are sent, another is computed.

Chunks (:mod:`fsdmoe.experts.routed`) hide exchanges of a layer behind the experts of the same layer. If
these experts take less time than the exchanges, attention of other rows can hide the rest. With
``experts.sub_batches`` = 2::

    sent                D0 ─── D1 ───── C0 ───── C1 ───── D0 ─── ...     D: dispatch   C: combine
    computed    A0 A1        K0     K1       A0       A1       K0 ...    A: attention   K: experts
                └───────── layer 1 ────────┘ └──── layer 2 ──── ...

So a layer returns while its experts' outputs are being sent, and the next layer waits for them, one sub-batch
after the other. This needs no weight of the first layer. The reverse order hides exchanges in backward too:
while gradients of one sub-batch are sent, attention, experts and weight gradients of the other are computed.
All nodes of a layer are made after those of the layer before, so in backward a layer ends before the previous
one begins. Sharding relies on this.

A sub-batch holds whole rows and is routed by itself, as a micro-batch of its own would be; of balance terms
and loads sums are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.moe import MoE, MoEAux
from fsdmoe.experts.routed import Combining
from fsdmoe.models.attention import AttentionContext
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.pieces import WholeRows
from fsdmoe.tensor_parallel.group import TensorGroup


class SubBatch(NamedTuple):
    """Some rows between two layers."""

    x_BSD: Tensor
    """The residual stream, without what is under way."""
    attention: AttentionContext
    routing: RoutingContext
    experts: MoE | None = None
    combining: Combining | None = None
    """What the experts of the layer before will add."""

    def joined(self) -> Tensor:
        """The residual stream with all of it."""
        if self.combining is None or self.experts is None:
            return self.x_BSD
        return self.x_BSD + self.experts.finish_combine(self.combining).view_as(self.x_BSD)

    def at_layer(self, layer: int) -> SubBatch:
        return self._replace(routing=self.routing.at_layer(layer))


def split_sub_batches(
    count: int, x_BSD: Tensor, batch: WholeRows, config: ModelConfig, tensor: TensorGroup
) -> list[SubBatch]:
    """The micro-batch whose residual stream ``x_BSD`` is, in so many parts."""
    if batch.routing.replay is not None or (batch.split is not None and batch.split.by_document):
        # Runs are refused beforehand, see fsdmoe.config.compatibility; this is for users' own loops.
        raise ConfigError(
            "experts.sub_batches: expected no recorded routing and no dynamic groups, got such a micro-batch"
            "; set it to 1"
        )
    ends = [len(x_BSD) * number // count for number in range(count + 1)]
    parts = x_BSD.split([end - start for start, end in pairwise(ends)])
    contexts = [batch.part(slice(*rows)).describe(config, tensor) for rows in pairwise(ends)]
    return [SubBatch(part_BSD, *each) for part_BSD, each in zip(parts, contexts, strict=True)]


def summed(auxes: Sequence[MoEAux]) -> MoEAux | None:
    """Of a layer, from those of its sub-batches."""
    return MoEAux(*(torch.stack(each).sum(0) for each in zip(*auxes, strict=True))) if auxes else None
