"""One MoE layer, in one process and over ranks, and the comparison of everything that training reads from it.

Every rank builds the same whole layer and the tokens of all ranks from one seed, runs the whole in one
process, then runs its own tokens through the split layer. Gradients are sums over tokens: a rank's expert
gradients are summed over the ranks that hold the same experts, those of router and shared experts over all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.core.placement import local_slice
from fsdmoe.experts.config import CapacityConfig, ExpertsConfig
from fsdmoe.experts.context import Routing, RoutingContext
from fsdmoe.experts.dispatch import ClonePolicy, FlexDispatcher, FlexPolicy
from fsdmoe.experts.dispatch.cloning import NO_CLONES
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layers import keep_less
from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.models.memory_parts import prepare_parts
from tests.support.coordinates import use_local_tensors

HIDDEN, WIDTH, NUM_EXPERTS = 16, 32, 8
ROOMY = FlexPolicy(rows=8.0)


@dataclass(frozen=True)
class Layout:
    """Degrees of both meshes; ``edp`` and ``dp_shard`` fill the world."""

    ep: int
    etp: int = 1
    tp: int = 1
    cp: int = 1
    dp_outer: int = 1


@dataclass(frozen=True)
class Case:
    """One layer and its tokens."""

    dispatcher: str
    routing: str = "random"
    """``random``; ``skewed``: all tokens choose the first three experts; ``single``: the last one most;
    ``one``: a single one, and top-k others of no weight; ``dropped``: some choices are -1."""
    tokens: str = "uneven"
    """``even``; ``uneven``, rank 1 without any; ``one``: a single rank has tokens."""
    top_k: int = 3
    bias: bool = False
    extras: str = "none"
    """``shared``, ``gated`` (shared with sigmoid gate) or ``latent``."""
    weight_after: bool = False
    policy: str = "dropless"
    """``expert_choice`` and ``padded`` (capacity, filled up) look at one rank's tokens together."""
    chunks: int = 1
    flex: FlexPolicy = ROOMY
    """Of ``flex``: bounds above whatever comes, so that it is not ``all_to_all`` that is tested."""
    clones: ClonePolicy = NO_CLONES
    sends_again: bool = False
    """Received rows are not kept for backward, which sends them again."""

    def config(self) -> ExpertsConfig:
        if self.policy == "expert_choice":
            return ExpertsConfig(selection="expert_choice")
        return ExpertsConfig(capacity=CapacityConfig(pad_to_max=True) if self.policy == "padded" else None)


class DroppingRouter(Router):
    """Drops the choices of small weight, token by token, so that layouts cannot change what is dropped."""

    def forward(self, x_TD: Tensor, *, context: RoutingContext | None = None) -> Routing:
        routing = super().forward(x_TD, context=context)
        dropped = routing.weights_TK < 0.3
        return routing._replace(
            ids_TK=routing.ids_TK.masked_fill(dropped, -1),
            weights_TK=routing.weights_TK.masked_fill(dropped, 0),
        )


def build_layer(case: Case) -> MoE:
    spec = RouterSpec(num_experts=NUM_EXPERTS, top_k=case.top_k, norm_topk=case.top_k > 1)
    gate = (DroppingRouter if case.routing == "dropped" else Router)(spec, HIDDEN, case.config())
    latent = None
    if case.extras == "latent":
        latent = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN // 2, HIDDEN)
    layer = MoE(
        gate,
        GroupedExperts(
            NUM_EXPERTS, HIDDEN // 2 if latent else HIDDEN, WIDTH, bias=case.bias,
            activation="gpt_oss" if case.bias else "swiglu", weight_after=case.weight_after,
        ),
        shared_experts=SharedExperts(HIDDEN, 24) if case.extras in ("shared", "latent") else None,
        shared_expert=SharedExperts(HIDDEN, 24) if case.extras == "gated" else None,
        shared_expert_gate=nn.Linear(HIDDEN, 1, bias=False) if case.extras == "gated" else None,
        latent=latent,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.4)
        if case.routing == "skewed":  # feature 0 of every token is 1: see token_parts
            layer.gate.weight[:, 0] = torch.tensor([10.0] * 3 + [-30.0] * (NUM_EXPERTS - 3))
        elif case.routing == "single":
            layer.gate.weight[-1, 0] = 30.0
        elif case.routing == "one":
            layer.gate.weight[:, 0] = -30.0
            layer.gate.weight[5, 0] = 10.0
    return layer


def token_parts(case: Case, world_size: int) -> list[Tensor]:
    """Each rank's own tokens."""
    sizes = [6] * world_size
    if case.tokens == "uneven":
        sizes = [(5 * rank + 4) % 9 if rank != 1 else 0 for rank in range(world_size)]
    elif case.tokens == "one":
        sizes = [7 if rank == world_size - 1 else 0 for rank in range(world_size)]
    parts = [torch.randn(size, HIDDEN) for size in sizes]
    for part in parts:
        part[:, 0] = 1.0
    return parts


def loss_of(y: Tensor) -> Tensor:
    """A sum over tokens that weighs every output differently, whatever rank holds the token."""
    return (y * torch.linspace(0.5, 1.5, y.shape[-1])).sum() + 0.1 * y.square().sum()


def run(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input gradient; parameter gradients stay in the layer."""
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    loss_of(y).backward()
    assert x.grad is not None
    return y.detach(), x.grad


def relative(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert torch.isfinite(got).all()
    scale = expected.norm().item()
    error = (got - expected).norm().item()
    return error / scale if scale else error


def check_case(case: Case, meshes: Meshes) -> dict[str, float]:
    """Relative errors of this rank against the one-process layer, by what was compared."""
    torch.manual_seed(1234)
    whole = build_layer(case)
    parts = token_parts(case, dist.get_world_size())
    # Where a rank's tokens compete, one process must look at the same tokens together.
    together = [torch.cat(parts)] if case.policy == "dropless" else parts
    y, dx = (torch.cat(pieces) for pieces in zip(*(run(whole, part) for part in together), strict=True))
    split = build_layer(case)
    split.load_state_dict(whole.state_dict())
    options = {"flex": case.flex, "chunks": case.chunks, "clones": case.clones}
    parallelize_experts(split, meshes, dispatcher=case.dispatcher, **options)
    use_local_tensors(split)
    if case.sends_again:
        memory = MemoryConfig(recompute=("dispatch",))
        prepare_parts([split], memory)
        keep_less([split], memory)
    my_y, my_dx = run(split, parts[dist.get_rank()])
    times = case.chunks if case.sends_again and split.dispatcher.crosses_ranks else 0
    assert split.dispatcher.traffic.calls["dispatch.again"] == times, "in every chunk, on every rank"
    if isinstance(split.dispatcher, FlexDispatcher) and case.flex.rows >= 8.0:
        assert not split.dispatcher.state.num_rerouted, "nothing may have taken all_to_all"

    is_hot = case.routing in ("skewed", "one") and case.top_k < NUM_EXPERTS and not case.clones.least_rows
    fits = case.dispatcher != "flex" or case.flex.rows >= 8.0
    if case.clones.slots and is_hot and fits and meshes.size(Axis.EP) == dist.get_world_size():
        calls = split.dispatcher.traffic.calls
        written = case.dispatcher == "flex" and split.gate.weight.is_cuda
        num_weights = 1 if written else len(dict(split.experts.named_parameters()))  # that travel alone
        assert calls["clones"] == num_weights * (1 if case.clones.keep else 2), (
            "experts must have been cloned"
        )
        assert calls["clones.backward"] == num_weights

    sizes = [len(part) for part in parts]
    errors = {
        "y": relative(my_y, y.split(sizes)[dist.get_rank()]),
        "dx": relative(my_dx, dx.split(sizes)[dist.get_rank()]),
    }
    for name, parameter in whole.named_parameters():
        mine = split.get_parameter(name)
        assert parameter.grad is not None
        assert mine.grad is not None, name
        if name.startswith("experts."):
            placement = whole.experts.placements()[name.removeprefix("experts.")]
            assert placement.global_shape == parameter.shape
            expected = local_slice(parameter.grad, placement, meshes)
            for axis in (Axis.EDP, Axis.EXPERT_DP_OUTER):
                dist.all_reduce(mine.grad, group=meshes.group(axis))
        else:
            expected = parameter.grad
            dist.all_reduce(mine.grad)
        errors[name] = relative(mine.grad, expected)
    assert whole.gate.weight.grad.norm() > 0, "the router must learn"
    return errors


def check_layout(layout: Layout, cases: list[Case]) -> float:
    """The worst relative error of this rank over ``cases``; run it on every rank."""
    meshes = build_meshes(ep=layout.ep, etp=layout.etp, tp=layout.tp, cp=layout.cp, dp_outer=layout.dp_outer)
    worst = 0.0
    for case in cases:
        for name, error in check_case(case, meshes).items():
            assert error <= 1e-5, f"{layout} {case}: {name} is off by {error:.2e}"
            worst = max(worst, error)
    return worst
