"""Which tokens of the whole rows are this rank's: in attention, and between the layers.

::

    whole rows [B, S]  --cut over cp-->  [B, L], seen by attention  --own stretch over tp-->  [B, L/tp]

The columns of a batch (tokens, labels, positions, …) are the same on all ranks of ``cp`` and ``tp``; the
residual stream of a rank holds only its own tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import PADDING
from fsdmoe.experts.context import RoutingContext
from fsdmoe.tensor_parallel.group import TensorGroup


class Pieces:
    """Of one micro-batch of whole rows of a ``[B, S]`` shape."""

    def __init__(
        self, shape: torch.Size, device: torch.device, plan: AttentionPlan | None, tensor: TensorGroup
    ) -> None:
        self._shape, self._device, self._plan, self._tensor = shape, device, plan, tensor

    def cut(self, x_BS: Tensor) -> Tensor:
        """What this rank's attention sees of a column of the batch, ``[B, L]``; zeros where it is padded."""
        return x_BS if self._plan is None else self._plan.split.shard(x_BS, self._plan.rank)

    def describe(self, routing: RoutingContext, num_global_tokens: Tensor | None) -> RoutingContext:
        """Say which of this rank's tokens belongs to which row, and how many tokens the whole step has."""
        places_BL = self._places()
        places_Bl = self._tensor.own(places_BL)
        is_padded = self._plan is not None and self._plan.split.num_padding > 0
        rows_B = torch.arange(self._shape[0], device=self._device)
        return replace(
            routing,
            sequence_ids_T=rows_B.repeat_interleave(places_Bl.shape[1]),
            num_sequences=self._shape[0],
            equal_sequences=True,
            sequence_positions_T=places_Bl.clamp(min=0).flatten(),
            token_mask_T=(places_Bl != PADDING).flatten() if is_padded else None,
            num_global_tokens=num_global_tokens,
        )

    def _places(self) -> Tensor:
        """Where each token that attention sees stands in its whole row."""
        if self._plan is not None:
            return self._plan.split.index_RBL[self._plan.rank].to(self._device)
        return torch.arange(self._shape[1], device=self._device).expand(self._shape)
