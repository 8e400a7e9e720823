"""EP for the experts of wrapped models: their parameters are split in place, their forward goes through our
dispatcher and kernels. Class, parameter names, router and everything around stay as they are.

Sizes: T tokens of this rank, K choices, R rows that reach this rank's experts, D hidden.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fsdmoe.core.autograd import running_node
from fsdmoe.core.capturing import compute_again
from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.placement import SplitMeshes
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.core.rules import divisor_problems
from fsdmoe.experts.cloned import ClonedExperts
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch import (
    CLONING,
    Choice,
    Dispatcher,
    Links,
    Rows,
    build_dispatcher,
    options_of,
)
from fsdmoe.experts.moe import ExpertCompute
from fsdmoe.experts.replay import Decision, RoutingTape
from fsdmoe.experts.routed import Compute, RoutedExperts
from fsdmoe.experts.split import check_split, down_bias_start, split_parameters
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.huggingface.lora import ExpertAdapters, path_around
from fsdmoe.kernels.expert_mlp import ExpertFunction
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights
from fsdmoe.kernels.late_grads import later
from fsdmoe.memory.calls import plain_calls
from fsdmoe.mesh import Axis, Meshes

_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")
"""What configurations call the number of experts that a token goes to."""


class Enforced(Protocol):
    """A block's choice while it replays."""

    ids_TK: Tensor | None


class FollowedForward(NamedTuple):
    """A forward that recorded or replayed."""

    routing: RoutingContext
    nodes: range
    """Of its graph; see :func:`fsdmoe.core.autograd.next_node`."""


class ParallelForward(ExpertCompute):
    """The forward of an experts module whose parameters are split over ``ep`` and ``etp``."""

    def __init__(
        self,
        module: nn.Module,
        adapters: ExpertAdapters,
        dispatcher: Dispatcher,
        *,
        start: int,
        experts: ExpertsConfig,
    ) -> None:
        self.module = module
        self.spec = adapters.spec
        self.adapters = adapters
        if isinstance(dispatcher, CLONING):
            refuse(self._clone_problems())
            self._routed: RoutedExperts = ClonedExperts(
                dispatcher, experts.chunks, experts.transfer_sms, experts=self
            )
        else:
            self._routed = RoutedExperts(dispatcher, experts.chunks, experts.transfer_sms)
        self.policy = ExpertPolicy(
            self.spec.activation,
            experts.weight_after,
            limit=self.spec.limit,
            sequential=experts.compute == "sequential",
            spare_sms=self._routed.spare_sms,
        )
        self.memory_calls = plain_calls("experts")
        self.down_bias_start = start
        self.counts_load = False
        self.load_E: Tensor | None = None
        """Where ``counts_load``: tokens of this rank's last forward by expert. Recompute finds the same."""
        self.token_mask_T: Tensor | None = None
        """Where ``counts_load``: false for padding, which is computed and does not count."""
        self.routing: RoutingContext | None = None
        """What to record or replay in a forward; see :mod:`fsdmoe.huggingface.replay`."""
        self.routing_again: FollowedForward | None = None
        """The same where a backward runs layers again: that of the forward which it belongs to."""
        self.enforced: Enforced | None = None
        """While the block around these experts replays: what its router was made to choose."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "split experts cannot be copied: they talk through process groups; build the model a second "
            "time, parallelize it and load a checkpoint into it"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.spec.arguments, args, strict=False)) | kwargs
        return self.rows(*(given[name] for name in self.spec.arguments))

    def rows(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts' output, in the shape of ``x``."""
        rows = Rows(
            x.reshape(-1, x.shape[-1]),
            weights.reshape(-1, weights.shape[-1]).float(),
            ids.reshape(-1, ids.shape[-1]),
        )
        routing = self.followed
        if routing is not None and routing.replay is not None:
            self._follow(rows, routing, routing.replay)
        if self.counts_load:
            ids_RK = rows.ids_RK.detach()
            zeros_E = torch.zeros(self.num_choices, device=ids_RK.device)
            counted_RK = torch.ones_like(ids_RK, dtype=zeros_E.dtype)
            if self.token_mask_T is not None and len(self.token_mask_T) == len(ids_RK):
                counted_RK *= self.token_mask_T.unsqueeze(1)
            self.load_E = zeros_E.scatter_add_(0, ids_RK.flatten(), counted_RK.flatten())
        return self._run(rows).view(x.shape)

    def _run(self, rows: Rows) -> Tensor:
        """``y_TD``: rows to their experts and back."""
        return self._routed.run(rows, self._begin)[0]

    @property
    def followed(self) -> RoutingContext | None:
        """What to record or replay now."""
        again = self.routing_again
        # The same backward may run other forwards again, and one that raised leaves this behind.
        return again.routing if again is not None and running_node() in again.nodes else self.routing

    @property
    def num_choices(self) -> int:
        """Ids that a router may choose."""
        return self.spec.num_experts + self.spec.num_identity

    def _follow(self, rows: Rows, routing: RoutingContext, tape: RoutingTape) -> None:
        """Record what the router chose, or see that it chose what was recorded."""
        if not tape.replays:
            decision = Decision(rows.ids_RK, rows.weights_RK, None)
            tape.record(routing.place, decision, self.num_choices)
        elif (
            self.enforced is None
            or self.enforced.ids_TK is None
            or not torch.equal(self.enforced.ids_TK, rows.ids_RK)
        ):
            raise ConfigError(
                f"replay: expected a router that chooses {tape.top_k} experts, as many as were recorded, by "
                f"a top-k over all of them in the same block, got {rows.ids_RK.shape[1]} in another way in "
                f"front of {type(self.module).__name__}; its routing cannot be replayed"
            )
        elif not rows.weights_RK.all():
            raise ConfigError(
                "replay: expected weights of the recorded experts, got zeros: the router in front of "
                f"{type(self.module).__name__} masks experts outside of its best groups, which are others "
                "than when it was recorded; its routing cannot be replayed"
            )

    @property
    def dispatcher(self) -> Dispatcher:
        """How rows reach their experts."""
        return self._routed.dispatcher

    def send_again(self) -> None:
        """Send the experts' rows again in backward in place of keeping them."""
        self._routed.send_again()

    def _begin(self, mlp: ExpertFunction | None = None) -> Compute:
        """Before rows are waited for: weights whose gradients are computed once those of rows are sent.
        ``mlp``: another function than that of the policy."""
        call = self.memory_calls["experts"]
        compute = self._computing(mlp or self._mlp)
        # As it is where nothing is named: torch.compile does not know the plain call.
        return compute if call is operator.call else functools.partial(call, compute)

    def _computing(self, mlp: ExpertFunction) -> Compute:
        if self.spec.is_copied or not (self.dispatcher.crosses_ranks and self._may_be_late):
            return functools.partial(self._compute, mlp)
        weights, active = self._weights(), self.adapters.active()
        late = later(weights.gate_up_E2ND, weights.down_EDN, self._routed.transfer_sms)
        weights = weights._replace(gate_up_E2ND=late.gate_up_E2ND, down_EDN=late.down_EDN)
        policy = self.policy._replace(late=late.grads)

        def compute(rows: Rows, max_rows: int | None) -> Tensor:
            updates = self.adapters.updates(active, rows.x_RD.dtype)
            return mlp(rows, weights, policy, max_rows, updates)

        return compute

    def own_weights(self) -> ExpertWeights:
        """What clones of this rank's experts are made of."""
        return self._weights()

    def _clone_problems(self) -> list[str]:
        kinds = {
            "gates and ups that are kept in another order": self.spec.is_copied,
            "a norm of outputs": self.spec.output_norm is not None,
        }
        return [
            f"experts.clones: expected experts that kernels read as they are, got {kind} in "
            f"{type(self.module).__name__}; set experts.clones = 0"
            for kind, is_there in kinds.items()
            if is_there
        ]

    def _weights(self) -> ExpertWeights:
        return self.spec.kernel_weights(self.module, self.down_bias_start)

    def _compute(self, mlp: ExpertFunction, rows: Rows, max_rows: int | None) -> Tensor:
        # Asked now: backward may make the weights again when other adapters are switched on.
        active = self.adapters.active()
        if self.spec.is_copied and torch.is_grad_enabled():
            # The kernels read a re-ordered copy of the weights. Kept until backward, the layers' copies would
            # be the whole model unsharded; they are made again instead.
            return compute_again(self._experts, mlp, rows, max_rows, active)
        return self._experts(mlp, rows, max_rows, active)

    def _experts(
        self, mlp: ExpertFunction, rows: Rows, max_rows: int | None, active: dict[str, list[str]]
    ) -> Tensor:
        updates = self.adapters.updates(active, rows.x_RD.dtype)
        return mlp(rows, self._weights(), self.policy, max_rows, updates)


class IdentityForward(ParallelForward):
    """Of experts some of which return their rows: those are added where the token is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num_experts, unit = self.spec.num_experts, self.spec.ep_unit
        ep = self.dispatcher.links.ep.size
        # A rank has its share of every unit (:meth:`ExpertsSpec.placements`), the dispatcher counts ranks.
        places = torch.arange(num_experts).view(-1, ep, unit // ep).transpose(0, 1).flatten().argsort()
        self._places = torch.cat((places, places.new_full((self.spec.num_identity,), -1)))

    def _run(self, rows: Rows) -> Tensor:
        self._places = self._places.to(rows.ids_RK.device)
        is_other = rows.ids_RK < self.spec.num_experts
        own_R1 = rows.weights_RK.masked_fill(is_other, 0.0).sum(-1, keepdim=True)
        y_RD = super()._run(rows._replace(ids_RK=self._places[rows.ids_RK]))
        return y_RD + (rows.x_RD * own_R1).to(y_RD.dtype)


class NormedForward(ParallelForward):
    """Of experts whose outputs pass a norm before they are weighted: each choice is a row of its own."""

    def _computing(self, mlp: ExpertFunction) -> Compute:
        return functools.partial(self._compute, mlp)

    def _experts(
        self, mlp: ExpertFunction, rows: Rows, max_rows: int | None, active: dict[str, list[str]]
    ) -> Tensor:
        x_RD, weights_RK, ids_RK = rows
        top_k = ids_RK.shape[1]
        ids_N1 = ids_RK.reshape(-1, 1)
        each = Rows(x_RD.repeat_interleave(top_k, 0), torch.ones_like(ids_N1, dtype=torch.float32), ids_N1)
        y_ND = super()._experts(mlp, each, max_rows, active)
        y_ND = self.module.get_submodule(self.spec.output_norm or "")(y_ND)
        return (y_ND.unflatten(0, (-1, top_k)) * weights_RK.unsqueeze(-1)).sum(1).to(x_RD.dtype)


def split_wrapped_experts(model: nn.Module, name: str, spec: ExpertsSpec, at: SplitMeshes) -> ExpertAdapters:
    """Leave the experts at ``name`` and the adapters around them, which are returned, with their parts."""
    adapters = ExpertAdapters(model, name, spec)
    bias_width = 0 if spec.down_bias is None else spec.hidden_size
    check_split(at, num_experts=spec.num_experts, width=spec.intermediate_size, bias_width=bias_width)
    refuse(divisor_problems("mesh.ep", at.size(Axis.EP), {"identity experts": spec.num_identity}))
    if at.size(Axis.ETP) > 1 and (spec.up is not None or spec.output_norm is not None):
        raise ConfigError(
            f"mesh.etp: expected 1, since the width of {name} ({type(model.get_submodule(name)).__name__}) "
            f"cannot be split, got {at.size(Axis.ETP)}; set mesh.etp = 1 and a larger mesh.ep"
        )
    split_parameters(model.get_submodule(name), spec.placements(), at)
    adapters.split(at)
    return adapters


def parallelize_wrapped_experts(
    model: nn.Module, name: str, spec: ExpertsSpec, meshes: Meshes, experts: ExpertsConfig
) -> Choice:
    """Split the experts at ``name`` (materialised or meta) in place, with the adapters around them; returns
    which dispatcher they got, and why."""
    module, adapters = model.get_submodule(name), split_wrapped_experts(model, name, spec, meshes)
    start = down_bias_start(spec.hidden_size, meshes)
    top_k = top_k_of(model, path_around(name))
    made, choice = build_dispatcher(
        experts.dispatcher,
        Links.of(meshes),
        num_experts=spec.num_experts,
        top_k=top_k,
        **options_of(experts),
    )
    if experts.sub_batches > 1:
        raise AssertionError("sub-batches of a wrapped model, which fsdmoe.config.compatibility refuses")
    forward = _kind_of(spec)(module, adapters, made, start=start, experts=experts)
    module.parallel_forward = forward  # type: ignore[assignment]
    module.memory_calls = forward.memory_calls  # type: ignore[assignment]
    rewrite(module, Rewrite.EXPERTS, _routed_block if spec.weights_inputs else _forward)
    return choice


def _kind_of(spec: ExpertsSpec) -> type[ParallelForward]:
    if spec.num_identity and spec.output_norm is not None:
        raise ConfigError("experts: expected identity experts or a norm of outputs, got both in one module")
    if spec.num_identity:
        return IdentityForward
    return ParallelForward if spec.output_norm is None else NormedForward


@torch.compiler.disable(reason="kernels of their own, messages between ranks, counts of every batch")
def _forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    return module.parallel_forward(*args, **kwargs)


@torch.compiler.disable(reason="kernels of their own, messages between ranks, counts of every batch")
def _routed_block(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """A block whose experts get inputs times weights. Its own forward computes every expert for every token;
    where the weight is zero, so are output and gradient, and such rows are left out."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = module.router(x_TD)
    weights_TK, ids_TK = scores_TE.topk(module.router.top_k, dim=-1)
    x_ND = (x_TD.unsqueeze(1) * weights_TK.unsqueeze(-1)).flatten(0, 1)
    ids_N1 = ids_TK.reshape(-1, 1)
    y_ND = module.parallel_forward.rows(x_ND, ids_N1, torch.ones_like(x_ND[:, :1]))
    y_TD = y_ND.unflatten(0, weights_TK.shape).sum(1)
    return module.shared_expert(x_TD) + y_TD, logits_TE


def parallel_forward_of(module: nn.Module) -> ParallelForward | None:
    """How a split experts module computes; None for any other module."""
    return module.__dict__.get("parallel_forward")


def top_k_of(model: nn.Module, name: str) -> int:
    """How many experts a token goes to, as the router next to the experts or the configuration says; it
    guides the choice of a dispatcher, and says which FLOPs are counted."""
    block = model.get_submodule(name.rpartition(".")[0])
    configs = [getattr(m, "config", None) for m in (block, model)]
    for place, key in [(m, "top_k") for m in (block, *block.children())] + [
        (config, key) for config in configs for key in _TOP_K
    ]:
        value = getattr(place, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2


def refuse_save_pretrained(model: nn.Module) -> None:
    """transformers would write one rank's pieces as whole weights; refuse, and name what writes the whole
    model. Whole weights that the caller gathered are written."""
    original = getattr(model, "save_pretrained", None)
    if original is None:
        return

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None:
            return original(*args, **kwargs)
        raise ConfigError(
            "save_pretrained: expected whole weights, got this rank's shards; on all ranks call "
            "fsdmoe.checkpoint.save(path, model), then fsdmoe.checkpoint.to_hf(path, folder); adapters "
            "alone: call save_pretrained of the PeftModel around it, or write them with to-adapter"
        )

    model.save_pretrained = save_pretrained  # type: ignore[assignment]


def stay_on_device(model: nn.Module, meshes: Meshes) -> None:
    """``model.to(device)``, with the device where it computes, changes nothing: shards are where they belong,
    in host memory too. Trainers call it, and name a CPU by a number. Anything else is as ever."""
    move = model.to

    @functools.wraps(move)
    def to(*args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        stays = device is not None and device.type == meshes.device.type
        stays = stays and (device.type == "cpu" or device.index in (None, meshes.device.index))
        return model if stays and dtype is None and memory_format is None else move(*args, **kwargs)

    model.to = to  # type: ignore[method-assign]
