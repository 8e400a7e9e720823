"""Which tokens of the whole rows are this rank's: in attention, and between the layers.

::

    whole rows [B, S]  --cut over cp-->  [B, L], seen by attention  --own range over tp---->  [B, L/tp]

The columns of a batch (tokens, labels, positions, …) are the same on all ranks of ``cp`` and ``tp``; the
residual stream of a rank holds only its own tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import PADDING
from fsdmoe.core.errors import ConfigError
from fsdmoe.data.origin import NO_DOCUMENT
from fsdmoe.experts.context import RoutingContext
from fsdmoe.models.attention import AttentionContext, SplitRows
from fsdmoe.models.config import ModelConfig
from fsdmoe.tensor_parallel.group import TensorGroup


class Pieces:
    """Of one micro-batch of whole rows ``[B, S]``."""

    def __init__(self, tokens_BS: Tensor, split: SplitRows | None, tensor: TensorGroup) -> None:
        length = tokens_BS.shape[1] if split is None else split.plan.split.local_len
        if length % tensor.size:
            raise ConfigError(
                f"mesh.tp: {tensor.size} ranks cannot share rows of {length} tokens evenly; pad the rows to "
                f"a multiple of {tensor.size}"
            )
        self._shape, self._device = tokens_BS.shape, tokens_BS.device
        self._split, self._tensor = split, tensor

    @property
    def are_whole(self) -> bool:
        """No other rank has a part of the rows."""
        return self._split is None

    @property
    def num_tokens(self) -> int:
        """Of the whole rows, padding too."""
        return self._shape.numel()

    def cut(self, x_BS: Tensor) -> Tensor:
        """What this rank's attention sees of a column of the batch, ``[B, L]``; zeros where it is padded."""
        return x_BS if self._split is None else self._split.plan.cut(x_BS)

    def describe(self, routing: RoutingContext, num_global_tokens: Tensor | None) -> RoutingContext:
        """Say which of this rank's tokens belongs to which sequence, and how many tokens the step has."""
        origin = None if routing.origin is None else routing.origin.map(self._own_origin)
        routing = replace(routing, num_global_tokens=num_global_tokens, origin=origin)
        if routing.token_mask_T is not None:
            own_Bl = self._tensor.own(self.cut(routing.token_mask_T))
            routing = replace(routing, token_mask_T=own_Bl.flatten())
        if self._split is None:
            if routing.sequence_group is None and self._tensor.size > 1:
                routing = replace(routing, sequence_group=self._tensor.group)
            places_S = torch.arange(self._shape[1], device=self._device)
            return self._by_row(routing, places_S.expand(self._shape))
        plan = self._split.plan
        routing = replace(routing, sequence_group=self._split.sequence_group)
        if plan.split.num_padding and routing.token_mask_T is None:  # cut, it has them
            is_token_Bl = self._tensor.own(plan.own.index_BL) != PADDING
            routing = replace(routing, token_mask_T=is_token_Bl.flatten())
        if self._split.by_document:
            return self._by_document(routing, plan)
        return self._by_row(routing, plan.own.index_BL)

    def _own_origin(self, column_BS: Tensor) -> Tensor:
        """A column of an origin, which is on the host, of this rank's tokens ``[T]``."""
        if self._split is not None:
            plan = self._split.plan
            column_BS = plan.split.shard(column_BS, plan.rank, fill=NO_DOCUMENT)
        return self._tensor.own(column_BS).flatten()

    def _by_row(self, routing: RoutingContext, places_BL: Tensor) -> RoutingContext:
        places_Bl = places_BL if self._tensor.size == 1 else self._tensor.own(places_BL)
        rows = RoutingContext.for_rows(*places_Bl.shape, device=self._device)
        return replace(
            routing,
            sequence_ids_T=rows.sequence_ids_T,
            num_sequences=rows.num_sequences,
            equal_sequences=rows.equal_sequences,
            sequence_positions_T=places_Bl.clamp(min=0).flatten(),
        )

    def _by_document(self, routing: RoutingContext, plan: AttentionPlan) -> RoutingContext:
        return replace(
            routing,
            sequence_ids_T=self._tensor.own(plan.own.document_BL).clamp(min=0).flatten(),
            num_sequences=plan.split.num_documents,
            sequence_positions_T=self._tensor.own(plan.own.position_BL).flatten(),
        )


class WholeRows(NamedTuple):
    """Whole rows, as a model is given them."""

    tokens_BS: Tensor
    positions_BS: Tensor
    document_ids_BS: Tensor | None
    split: SplitRows | None
    routing: RoutingContext
    num_global_tokens: Tensor | None

    def part(self, rows: slice) -> WholeRows:
        """Some of the rows."""
        split = self.split
        origin, mask_BS = self.routing.origin, self.routing.token_mask_T
        routing = replace(
            self.routing,
            origin=None if origin is None else origin.map(lambda x: x[rows]),
            token_mask_T=None if mask_BS is None else mask_BS[rows],
        )
        return self._replace(
            tokens_BS=self.tokens_BS[rows],
            positions_BS=self.positions_BS[rows],
            document_ids_BS=None if self.document_ids_BS is None else self.document_ids_BS[rows],
            split=None if split is None else split._replace(plan=split.plan.part(rows)),
            routing=routing,
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


def positions_in_documents(document_ids_BS: Tensor) -> Tensor:
    """Of every token in its document."""
    num_tokens = document_ids_BS.shape[1]
    places_BS = torch.arange(num_tokens, device=document_ids_BS.device).expand_as(document_ids_BS)
    goes_on_BS = F.pad(document_ids_BS[:, 1:] == document_ids_BS[:, :-1], (1, 0), value=False)
    return places_BS - places_BS.masked_fill(goes_on_BS, 0).cummax(1).values
