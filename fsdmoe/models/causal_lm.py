"""What the training loop and the feed need of a language model, native or wrapped: :class:`CausalLM`.

Every rank calls it on its own, disjoint tokens. The loss that comes out is already this rank's share of the
*global* mean: each term is a sum over valid tokens divided by that term's count over the whole step
(:class:`StepCounts`), so gradients add up by plain sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdmoe.experts.bias import BiasedRouter
from fsdmoe.experts.context import RoutingContext
from fsdmoe.fsdp import Engine
from fsdmoe.models.attention import SplitRows
from fsdmoe.precision.loss_scale import LossScaler


@dataclass(frozen=True)
class StepCounts:
    """How many tokens each loss term is averaged over, across all ranks and micro-batches of one step."""

    tokens: torch.Tensor
    """All tokens: what auxiliary terms are weighed by."""
    loss_tokens: torch.Tensor
    """Tokens with a next token to predict."""
    mtp_tokens: tuple[torch.Tensor, ...] = ()
    """For each multi-token prediction depth, tokens with a target that far ahead."""

    @classmethod
    def from_vector(cls, counts: torch.Tensor) -> StepCounts:
        """From the (summed) vectors of :meth:`CausalLM.count_tokens`; a term without any token divides by
        one."""
        tokens, loss_tokens, *mtp_tokens = counts.float().clamp(min=1.0).unbind()
        return cls(tokens, loss_tokens, tuple(mtp_tokens))


@dataclass(frozen=True)
class LossOutput:
    """Of a call with labels. ``loss`` is what to call backward on; the rest is detached."""

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    """This rank's share of the global mean next-token loss."""
    balance_loss: torch.Tensor
    loads_LE: torch.Tensor
    """Tokens that this rank sent to each expert, a row a MoE layer."""


@dataclass(frozen=True)
class LogitsOutput:
    """Of a call without labels."""

    logits_BSV: torch.Tensor
    loads_LE: torch.Tensor
    """As in :class:`LossOutput`."""


class CausalLM(Protocol):
    """A causal language model as ``train.py`` calls it; :func:`fsdmoe.as_causal_lm` makes one of any."""

    def __call__(
        self,
        tokens_BS: torch.Tensor,
        *,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        labels_BS: torch.Tensor,
        loss_mask_BS: torch.Tensor,
        counts: StepCounts | None = None,
        routing: RoutingContext | None = None,
        split: SplitRows | None = None,
    ) -> LossOutput:
        """Run this rank's rows, or with ``split`` its piece of rows that several ranks share: all of them
        are given the whole rows. ``labels`` are already shifted: the token after each token."""
        ...

    def count_tokens(
        self, labels_BS: torch.Tensor, loss_mask_BS: torch.Tensor, document_ids_BS: torch.Tensor | None
    ) -> torch.Tensor:
        """``[all tokens, tokens with loss, tokens with loss at each further depth]``, to be summed over the
        step."""
        ...

    def follow_plans(self, seq_len: int) -> bool:
        """Whether rows of this length, whole or packed, may come with a plan of what attends to what."""
        ...

    def routers(self) -> Sequence[BiasedRouter]:
        """The routers that policies can balance, in the order of the rows of ``loads_LE``; none in a wrapped
        model that routes by itself."""
        ...

    def moe_layers(self) -> list[int]:
        """The model's layer numbers of the rows of ``loads_LE``."""
        ...

    def train(self) -> object:
        """From now on, compute as in training."""
        ...

    def eval(self) -> object:
        """From now on, compute as in evaluation."""
        ...


class MicroBatches:
    """Runs micro-batches as they come; :mod:`fsdmoe.graphs` replays them instead."""

    def __init__(self, model: CausalLM, engine: Engine, scaler: LossScaler) -> None:
        self._model = model
        self._engine = engine
        self._scaler = scaler

    def run(
        self, inputs: dict[str, Any], counts: StepCounts, routing: RoutingContext, *, last: bool
    ) -> LossOutput:
        """Forward and backward; ``last`` of a step completes its gradient. What comes back has no graph."""
        with self._engine.micro_batch(last=last):
            out = self._model(**inputs, counts=counts, routing=routing)
            loss = self._scaler.scale(out.loss) if self._scaler.enabled else out.loss
            loss.backward()
        return LossOutput(out.loss.detach(), out.cross_entropy, out.balance_loss, out.loads_LE)

    def close(self) -> None:
        """Before communicators go."""
