"""The MoE layer: route → dispatch → compute → combine, with shared experts computed concurrently.

Three classes, from the inside out: :class:`GroupedExperts` holds weights and computes the rows of this rank,
:class:`~fsdmoe.experts.routed.RoutedExperts` brings rows there and back (wrapped models use it too),
:class:`MoE` routes.

Submodules carry Hugging Face's names: ``gate``, ``experts``, ``shared_experts`` (DeepSeek) or
``shared_expert`` with ``shared_expert_gate`` (Qwen2), ``fc1_latent_proj`` and ``fc2_latent_proj`` (Nemotron's
latent MoE: rows are sent and computed at a smaller width; routing and shared experts keep the full one).

The layer is built whole, on the meta device if need be, and runs so in one process;
:func:`fsdmoe.experts.parallel.parallelize_experts` splits its experts and gives it a dispatcher.

Sizes: T tokens of this rank, D hidden, L latent (= D without latent projections), K choices, E experts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdmoe.core.placement import Placement, halves
from fsdmoe.experts.balance import joint_balance_loss
from fsdmoe.experts.cloned import ClonedExperts
from fsdmoe.experts.config import BalanceConfig
from fsdmoe.experts.context import Routing, RoutingContext
from fsdmoe.experts.dispatch import CLONING, Dispatcher, Links, Rows
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.routed import Combining, Compute, Concurrent, Dispatching, RoutedExperts
from fsdmoe.experts.router import Router
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.experts.split import expert_placement, whole_down_bias
from fsdmoe.kernels.expert_mlp import ExpertFunction, expert_function
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertPolicy, ExpertWeights
from fsdmoe.kernels.late_grads import LateWeights, later
from fsdmoe.memory.calls import plain_calls


class ExpertCompute:
    """Whatever holds experts: how they compute, and the function that does."""

    @property
    def policy(self) -> ExpertPolicy:
        """How the experts compute. Setting it chooses the function that does."""
        return self._policy

    @policy.setter
    def policy(self, policy: ExpertPolicy) -> None:
        self._policy = policy
        self._mlp: ExpertFunction = expert_function(policy)
        self._may_be_late = policy.may_be_late


class GroupedExperts(ExpertCompute, nn.Module):
    """All experts of a layer (of this rank, once split): weights fused as Hugging Face stores them.

    ::

        gate_up_proj       [E, 2I, H]   first I rows the gates, last I the ups     view [E, 2, I, H]
        down_proj          [E, H, I]
        gate_up_proj_bias  [E, 2I]      optional (gpt-oss)                         view [E, 2, I]
        down_proj_bias     [E, H]       optional

    EP splits E. ETP splits the width I of both halves; ``down_proj_bias`` has no width, so ETP splits its H:
    each member adds its range of the bias to its partial output, and the members' sum has the whole bias
    once. Thus no two ranks of an (ep, etp) group hold the same element, and no gradient needs a sum over ETP.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        weight_after: bool = False,
        sequential: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.policy = ExpertPolicy(activation, weight_after, sequential=sequential)
        self.down_bias_start = 0
        for name, placement in self._all_placements().items():
            parameter = None
            if bias or not name.endswith("bias"):
                parameter = nn.Parameter(torch.empty(placement.global_shape))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights, zero biases; nothing on the meta device."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=std)

    def placements(self) -> dict[str, Placement]:
        """How ``ep`` and ``etp`` cut each parameter of the whole module."""
        return {name: self._all_placements()[name] for name, _ in self.named_parameters()}

    def _all_placements(self) -> dict[str, Placement]:
        hidden, width = self.hidden_size, self.intermediate_size
        cut = functools.partial(expert_placement, self.num_experts)
        return {
            "gate_up_proj": cut((2 * width, hidden), halves(1)),
            "down_proj": cut((hidden, width), Shard(2)),
            "gate_up_proj_bias": cut((2 * width,), halves(1)),
            "down_proj_bias": cut((hidden,), Shard(1)),
        }

    def forward(
        self,
        x_RD: Tensor,
        weights_RK: Tensor,
        ids_RK: Tensor,
        *,
        max_rows: int | None = None,
        late: LateWeights | None = None,
        mlp: ExpertFunction | None = None,
    ) -> Tensor:
        """``y_RD``, this ETP member's part of it; ``ids`` count this rank's experts, -1 is on another
        rank. ``late``: what :meth:`late_weights` gave. ``mlp``: another function than that of the policy."""
        gate_up, down, grads = late or LateWeights(self.gate_up_proj, self.down_proj)
        down_bias: Tensor | None = self.down_proj_bias
        if down_bias is not None:
            down_bias = whole_down_bias(down_bias, self.hidden_size, self.down_bias_start)
        weights = ExpertWeights(gate_up, down, self.gate_up_proj_bias, down_bias)
        policy = self._policy if grads is None else self._policy._replace(late=grads)
        return (mlp or self._mlp)(Rows(x_RD, weights_RK, ids_RK), weights, policy, max_rows, NO_UPDATES)

    def own_weights(self) -> ExpertWeights:
        """What clones of this rank's experts are made of."""
        return ExpertWeights(self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)

    def late_weights(self, spare_sms: int) -> LateWeights | None:
        """Before rows are waited for: weights whose gradients are computed once those of rows are sent."""
        return later(self.gate_up_proj, self.down_proj, spare_sms) if self._may_be_late else None

    def extra_repr(self) -> str:
        return (
            f"{self.gate_up_proj.shape[0]} of {self.num_experts} experts, hidden {self.hidden_size}, "
            f"width {self.down_proj.shape[2]} of {self.intermediate_size}, {self.policy.activation}"
        )


class MoEAux(NamedTuple):
    """What a MoE layer returns with its output; returned, so that recompute counts nothing twice."""

    loss: Tensor
    """fp32 scalar: this rank's share of the layer's balance terms, weighted and normalised."""
    load_E: Tensor
    """fp32: choices each expert received from this rank's tokens."""
    prob_sum_E: Tensor
    """fp32, differentiable: summed routing probabilities, for balance terms that span layers."""

    @classmethod
    def of(cls, routing: Routing) -> MoEAux:
        return cls(routing.loss, routing.load_E, routing.prob_sum_E)


def total_balance(
    auxes: Sequence[MoEAux], config: BalanceConfig, context: RoutingContext, *, top_k: int
) -> Tensor:
    """Every layer's own terms, and transformers' form, which is one product over all layers."""
    balance = torch.stack([aux.loss for aux in auxes]).sum()
    if config.transformers:
        joint = joint_balance_loss(
            torch.stack([aux.load_E for aux in auxes]),
            torch.stack([aux.prob_sum_E for aux in auxes]),
            top_k=top_k,
            num_global_tokens=context.num_global_tokens,
            sequence_group=context.sequence_group,
        )
        balance = balance + config.transformers * joint
    return balance


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
        self.memory_calls = plain_calls("experts", "shared_experts")
        self.exchange_by(LocalDispatcher(Links.alone(), experts.num_experts))

    @property
    def dispatcher(self) -> Dispatcher:
        """How rows reach their experts."""
        return self._routed.dispatcher

    @property
    def has_own_rows(self) -> bool:
        """Whether experts compute with other rows than those that the router keeps."""
        return self.fc1_latent_proj is not None or self.dispatcher.crosses_ranks

    def exchange_by(
        self, dispatcher: Dispatcher, chunks: int = 1, transfer_sms: int = 0, sub_batches: int = 1
    ) -> None:
        """How rows reach their experts, in how many chunks, and in how many sub-batches they come."""
        counts = chunks, transfer_sms, sub_batches
        if isinstance(dispatcher, CLONING):
            self._routed: RoutedExperts = ClonedExperts(dispatcher, *counts, experts=self.experts)
        else:
            self._routed = RoutedExperts(dispatcher, *counts)
        if self.experts.policy.spare_sms != self._routed.spare_sms:
            self.experts.policy = self.experts.policy._replace(spare_sms=self._routed.spare_sms)
        if not self.has_own_rows:
            # The router keeps the very rows that experts compute with: named before either keeps them.
            self.memory_calls |= plain_calls("route")
        else:
            self.memory_calls.pop("route", None)

    def send_again(self) -> None:
        """Send the experts' rows again in backward in place of keeping them."""
        self._routed.send_again()

    @property
    def sub_batches(self) -> int:
        """In how many to call it, by :meth:`start_dispatch`, :meth:`start_combine`,
        :meth:`finish_combine`."""
        return self._routed.sub_batches

    @torch.compiler.disable(reason="kernels of their own, messages between ranks, counts of every batch")
    def forward(self, x: Tensor, context: RoutingContext | None = None) -> tuple[Tensor, MoEAux]:
        """``x [..., D]`` -> ``(y [..., D], aux)``."""
        routing, rows = self._route(x, context)
        y_TL, shared_TD = self._routed.run(rows, self._compute, self._concurrent, routing.x_TD)
        return self._joined(y_TL, shared_TD).view(x.shape), MoEAux.of(routing)

    # The same in thirds, between which rows are under way

    def start_dispatch(self, x: Tensor, context: RoutingContext | None = None) -> tuple[Dispatching, MoEAux]:
        """Start sending the rows of ``x [..., D]`` to their experts."""
        routing, rows = self._route(x, context)
        return self._routed.start_dispatch(rows, self._concurrent, routing.x_TD), MoEAux.of(routing)

    def start_combine(self, dispatching: Dispatching) -> Combining:
        """Wait for them, compute them, and start sending them back."""
        plan, returning, shared_TD = self._routed.start_combine(dispatching, self._compute)
        # Here, not when it is added: the layer ends before, and with it the time of its weights.
        return Combining(plan, returning, self._routed.join(shared_TD))

    def finish_combine(self, combining: Combining) -> Tensor:
        """``y [T, D]``. It needs weights of this layer only where there are latent projections."""
        return self._joined(self.dispatcher.restore(combining.plan, combining.returning), combining.other_TD)

    @property
    def combines_late(self) -> bool:
        """Whether :meth:`finish_combine` may be called once the layer's weights are gone."""
        return self.fc2_latent_proj is None

    def _route(self, x: Tensor, context: RoutingContext | None) -> tuple[Routing, Rows]:
        x_TD = x.reshape(-1, x.shape[-1])
        route = self.memory_calls.get("route", operator.call)
        routing: Routing = route(self.gate, x_TD, context=context)
        rows = Rows(self._to_latent(routing.x_TD), routing.weights_TK.float(), routing.ids_TK)
        return routing, rows

    def _joined(self, y_TL: Tensor, shared_TD: Tensor | None) -> Tensor:
        y_TD = self._from_latent(y_TL)
        return y_TD if shared_TD is None else y_TD + shared_TD

    @property
    def _concurrent(self) -> Concurrent | None:
        has_shared = self.shared_experts is not None or self.shared_expert is not None
        return self._shared if has_shared else None

    def _compute(self, mlp: ExpertFunction | None = None) -> Compute:
        late = None
        if self.dispatcher.crosses_ranks:
            late = self.experts.late_weights(self._routed.transfer_sms)

        def compute(rows: Rows, max_rows: int | None) -> Tensor:
            return self.experts(*rows, max_rows=max_rows, late=late, mlp=mlp)

        return functools.partial(self.memory_calls["experts"], compute)

    def _to_latent(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_TD)

    def _from_latent(self, y_TL: Tensor) -> Tensor:
        return y_TL if self.fc2_latent_proj is None else self.fc2_latent_proj(y_TL)

    def _shared(self, x_TD: Tensor) -> Tensor:
        return self.memory_calls["shared_experts"](self._compute_shared, x_TD)

    def _compute_shared(self, x_TD: Tensor) -> Tensor:
        shared, gate = self.shared_experts or self.shared_expert, self.shared_expert_gate
        assert shared is not None
        return shared(x_TD) if gate is None else torch.sigmoid(gate(x_TD)) * shared(x_TD)
