"""The MoE layer: route → dispatch → compute → combine, with shared experts beside it.

Submodules carry Hugging Face's names: ``gate``, ``experts``, ``shared_experts`` (DeepSeek) or
``shared_expert`` with ``shared_expert_gate`` (Qwen2), ``fc1_latent_proj`` and ``fc2_latent_proj`` (Nemotron's
latent MoE: rows travel and are computed at a smaller width; routing and shared experts keep the full one).

The layer is built whole, on the meta device if need be, and runs so in one process;
:func:`fsdmoe.experts.parallel.parallelize_experts` splits its experts and gives it a dispatcher.

Sizes: T tokens of this rank, D hidden, L latent (= D without latent projections), K choices, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.experts.context import Routing, RoutingContext
from fsdmoe.experts.dispatch import Dispatcher, Links, Rows
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.experts import GroupedExperts
from fsdmoe.experts.router import Router
from fsdmoe.experts.shared import SharedExperts, SideStream


class MoEAux(NamedTuple):
    """What a MoE layer returns beside its output; returned, so that recompute counts nothing twice."""

    loss: Tensor
    """fp32 scalar: this rank's share of the layer's balance terms, weighted and normalised."""
    load_E: Tensor
    """fp32: choices each expert received from this rank's tokens."""
    prob_sum_E: Tensor
    """fp32, differentiable: summed routing probabilities, for balance terms that span layers."""


class MoE(nn.Module):
    """One MoE layer."""

    def __init__(
        self,
        gate: Router,
        experts: GroupedExperts,
        *,
        shared_experts: SharedExperts | None = None,
        shared_expert: SharedExperts | None = None,
        shared_expert_gate: nn.Linear | None = None,
        latent: tuple[nn.Linear, nn.Linear] | None = None,
    ) -> None:
        """``latent``: the projections to the experts' width and back."""
        super().__init__()
        self.gate = gate
        self.experts = experts
        if shared_experts is not None and shared_expert is not None:
            raise AssertionError("expected shared_experts or shared_expert, got both: two names of one thing")
        self.shared_experts = shared_experts
        self.shared_expert = shared_expert
        self.shared_expert_gate = shared_expert_gate
        self.fc1_latent_proj = None if latent is None else latent[0]
        self.fc2_latent_proj = None if latent is None else latent[1]
        self.dispatcher: Dispatcher = LocalDispatcher(Links.alone(), experts.num_experts)
        self._beside = SideStream()

    def forward(self, x: Tensor, context: RoutingContext | None = None) -> tuple[Tensor, MoEAux]:
        """``x [..., D]`` -> ``(y [..., D], aux)``."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing: Routing = self.gate(x_TD, context=context)
        y_TD = self._experts_apart(routing) if self.dispatcher.crosses_ranks else self._experts_of(routing)
        return y_TD.view(x.shape), MoEAux(routing.loss, routing.load_E, routing.prob_sum_E)

    @torch.compiler.disable(reason="messages between ranks, and counts that change with every batch")
    def _experts_apart(self, routing: Routing) -> Tensor:
        return self._experts_of(routing)

    def _experts_of(self, routing: Routing) -> Tensor:
        dispatcher, x_TD = self.dispatcher, routing.x_TD
        rows = Rows(self._to_latent(x_TD), routing.weights_TK.float(), routing.ids_TK)
        plan, rows = dispatcher.prepare(rows)
        leaving = dispatcher.dispatch(plan, rows)
        shared_TD = self._start_shared(x_TD)
        rows = dispatcher.gather(plan, leaving)
        del leaving
        y_RL = self.experts(*rows, max_rows=plan.max_rows)
        returning = dispatcher.combine(plan, dispatcher.reduce(plan, y_RL))
        y_TD = self._from_latent(dispatcher.restore(plan, returning))
        return y_TD if shared_TD is None else y_TD + self._beside.join(shared_TD)

    def _to_latent(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_TD)

    def _from_latent(self, y_TL: Tensor) -> Tensor:
        return y_TL if self.fc2_latent_proj is None else self.fc2_latent_proj(y_TL)

    def _start_shared(self, x_TD: Tensor) -> Tensor | None:
        shared, gate = self.shared_experts or self.shared_expert, self.shared_expert_gate
        if shared is None:
            return None

        def compute(x_TD: Tensor) -> Tensor:
            return shared(x_TD) if gate is None else torch.sigmoid(gate(x_TD)) * shared(x_TD)

        return self._beside.run(compute, x_TD)
