"""What goes into the router and what comes out of it: the architecture's facts, the batch's facts, the
decision.

Legend: T tokens of this rank's micro-batch, E experts, K choices a token, L routers of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.data.origin import Origin
from fsdmoe.experts.divide import experts_per_rank
from fsdmoe.experts.replay import DecisionPlace, RoutingTape


@dataclass(frozen=True, kw_only=True)
class RoutingContext:
    """What routing needs to know of the batch and of the ranks; built once a forward and passed down by the
    model.

    The defaults describe one process that routes one sequence.
    """

    layer: int = 0
    """Which of the model's routers this is, counting MoE layers only: the row of ``prior_load_LE`` and the
    layer on the tape. See :meth:`at_layer`."""
    micro_batch: int = 0
    """Index of the micro-batch since the tape began; only record and replay read it."""
    origin: Origin | None = None
    """Documents and positions of the tokens, for record and replay: of the whole rows as they are given to a
    model, of this rank's tokens ``[T]`` once it has cut them."""
    sequence_ids_T: Tensor | None = None
    """Sequence of each token, int64 in [0, num_sequences); none is one sequence. Ranks that hold pieces of
    the same sequences (cp x tp) must number them alike."""
    num_sequences: int = 1
    equal_sequences: bool = False
    """Tokens stand sequence after sequence, ``T / num_sequences`` of each: what the fused router can sum."""
    sequence_positions_T: Tensor | None = None
    """Index of each token within its sequence; needed when sequences are split and capacity spans them."""
    token_mask_T: Tensor | None = None
    """False for padding: routed like any token, but never counted and first to be dropped. Not the loss mask:
    a prompt token without a loss is a real token. ``[B, S]`` of the whole rows as they are given to a model,
    of this rank's tokens ``[T]`` once it has cut them."""
    num_global_tokens: int | float | Tensor | None = None
    """Counted tokens of the whole step, over all ranks and micro-batches: the divisor of every balance term.
    None takes this call's own tokens, which is right for one process and one micro-batch only."""
    sequence_group: dist.ProcessGroup | None = None
    """Ranks that hold pieces of the same sequences (cp x tp); none is one rank."""
    global_group: dist.ProcessGroup | None = None
    """All ranks with tokens of this step; none is one rank."""
    num_devices: int = 1
    """EP ranks: experts [i * E / n, (i + 1) * E / n) stand on device i."""
    prior_load_LE: Tensor | None = None
    """This rank's loads in the step's earlier micro-batches, a row a router; only the global-batch scope
    reads it."""
    replay: RoutingTape | None = None
    """Records decisions, or enforces recorded ones."""

    @classmethod
    def for_rows(
        cls, num_rows: int, row_length: int, *, device: torch.device | str | None = None
    ) -> RoutingContext:
        """A batch of whole rows, each row a sequence; add what else is known with
        :func:`dataclasses.replace`."""
        ids_B = torch.arange(num_rows, device=device)
        return cls(
            sequence_ids_T=ids_B.repeat_interleave(row_length),
            num_sequences=num_rows,
            equal_sequences=True,
            sequence_positions_T=torch.arange(row_length, device=device).repeat(num_rows),
        )

    def experts_per_device(self, num_experts: int) -> int:
        """How many of ``num_experts`` stand on each device."""
        return experts_per_rank(num_experts, self.num_devices)

    @property
    def place(self) -> DecisionPlace:
        """Where in the run a decision is made, for the tape."""
        return DecisionPlace(self.micro_batch, self.layer, self.origin)

    def at_layer(self, layer: int) -> RoutingContext:
        return replace(self, layer=layer)


class Routing(NamedTuple):
    """A layer's decision. K is top-k, except under expert choice and padded capacity, which need more
    columns."""

    weights_TK: Tensor
    """fp32, differentiable; zero where nothing is assigned."""
    ids_TK: Tensor
    """int64 expert of each choice; -1 where it was dropped or never made."""
    load_E: Tensor
    """fp32, no gradient: choices an expert received from this rank's counted tokens, before any dropping."""
    loss: Tensor
    """fp32 scalar: this rank's share of all balance terms of this layer; the shares of all ranks and
    micro-batches add up to the step's."""
    prob_sum_E: Tensor
    """fp32, differentiable: routing probability of each expert, summed over this rank's counted tokens; of no
    meaning unless ``balance.transformers`` asks for it. With load_E, all that :func:`joint_balance_loss`
    needs."""
    x_TD: Tensor
    """What was routed, for the experts: see :func:`fsdmoe.experts.scores.logits_and_input`."""
