"""The rows of a micro-batch in lanes (``experts.lanes``): one lane computes while another one's rows travel.

Chunks (:mod:`fsdmoe.experts.routed`) hide exchanges of a layer behind the experts of the same layer. Where
those take less time than the exchanges, attention has to help, and that is possible for other rows only::

    sent                D0 ─── D1 ───── C0 ───── C1 ───── D0 ─── ...     D: dispatch   C: combine
    computed    A0 A1        K0     K1       A0       A1       K0 ...    A: attention   K: experts
                └───────── layer 1 ────────┘ └──── layer 2 ──── ...

So a layer returns lanes whose experts' outputs are still under way, and the next layer waits for them, lane
by lane. No weight of the first is needed for that. Read backwards the order is again one that hides: while
gradients of a lane travel, the other lane's attention, experts and weights' gradients are computed. And all
nodes of a layer are still made after those of the layer before, so in backward a layer is done before the one
before it begins, which is what sharding counts on.

A lane holds whole rows and is routed by itself, as a micro-batch of its own would be; of balance terms and
loads the sums over lanes are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.moe import MoE, MoEAux
from fsdmoe.experts.routed import Arriving
from fsdmoe.models.attention import AttentionContext, SplitRows
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.pieces import Pieces
from fsdmoe.tensor_parallel.group import TensorGroup


class Lane(NamedTuple):
    """Some rows between two layers."""

    x_BSD: Tensor
    """The residual stream, without what is under way."""
    attention: AttentionContext
    routing: RoutingContext
    experts: MoE | None = None
    arriving: Arriving | None = None
    """What the experts of the layer before will add."""

    def arrived(self) -> Tensor:
        """The residual stream with all of it."""
        if self.arriving is None or self.experts is None:
            return self.x_BSD
        return self.x_BSD + self.experts.arrive(self.arriving).view_as(self.x_BSD)

    def at_layer(self, layer: int) -> Lane:
        return self._replace(routing=self.routing.at_layer(layer))


class MicroBatch(NamedTuple):
    """Whole rows, as a model is given them."""

    tokens_BS: Tensor
    positions_BS: Tensor
    document_ids_BS: Tensor | None
    split: SplitRows | None
    routing: RoutingContext
    num_global_tokens: Tensor | None

    def part(self, rows: slice) -> MicroBatch:
        """Some of the rows."""
        split, origin = self.split, self.routing.origin
        return self._replace(
            tokens_BS=self.tokens_BS[rows],
            positions_BS=self.positions_BS[rows],
            document_ids_BS=None if self.document_ids_BS is None else self.document_ids_BS[rows],
            split=None if split is None else split._replace(plan=split.plan.part(rows)),
            routing=replace(self.routing, origin=None if origin is None else origin.map(lambda x: x[rows])),
        )

    def describe(self, config: ModelConfig, tensor: TensorGroup) -> tuple[AttentionContext, RoutingContext]:
        """What layers need to know of this rank's pieces."""
        pieces = Pieces(self.tokens_BS, self.split, tensor)
        lengths_BS = config.rotary.lengths(self.positions_BS, self.document_ids_BS)
        attention = AttentionContext.build(
            pieces.cut(self.positions_BS), self.document_ids_BS, config, self.split,
            lengths_BS=None if lengths_BS is None else pieces.cut(lengths_BS),
        )  # fmt: skip
        return attention, pieces.describe(self.routing, self.num_global_tokens)


def num_lanes(layers: Iterable[nn.Module], num_rows: int) -> int:
    """In how many lanes to send so many rows through these layers. In training all ranks have equally many
    rows, so they say the same."""
    experts = [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]
    if not torch.is_grad_enabled():
        return 1
    return min(num_rows, max((each.lanes for each in experts), default=1))


def split_lanes(
    count: int, x_BSD: Tensor, batch: MicroBatch, config: ModelConfig, tensor: TensorGroup
) -> list[Lane]:
    """The micro-batch whose residual stream ``x_BSD`` is, in so many lanes."""
    if batch.routing.replay is not None or (batch.split is not None and batch.split.by_document):
        # Runs are refused beforehand, see fsdmoe.config.lanes; this is for loops of one's own.
        raise ConfigError(
            f"experts.lanes: expected no recorded routing and no dynamic groups, got {count} lanes; write 1"
        )
    ends = [len(x_BSD) * number // count for number in range(count + 1)]
    parts = x_BSD.split([end - start for start, end in pairwise(ends)])
    contexts = [batch.part(slice(*rows)).describe(config, tensor) for rows in pairwise(ends)]
    return [Lane(part_BSD, *each) for part_BSD, each in zip(parts, contexts, strict=True)]


def summed(auxes: Sequence[MoEAux]) -> MoEAux | None:
    """Of a layer, from those of its lanes."""
    return MoEAux(*(torch.stack(each).sum(0) for each in zip(*auxes, strict=True))) if auxes else None
