"""A tiny MoE decoder with tensor- and expert-parallel parts, for tests of the sharding engine.

Every rank brings its own tokens. Attention weights are whole; the MLP is split over ``tp`` and the experts
over ``ep`` and ``etp``: tokens are gathered before them and their outputs summed back, so gradients are
partial as the engine expects."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdmoe.core.placement import Placement, halves, placed_parameter, placement_of
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.mesh import Axis, Meshes

VOCAB, H, N, E, K = 40, 16, 8, 8, 2


class Gather(torch.autograd.Function):
    """Everybody's rows; backward sums what everybody says about mine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_sum(dy, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """My rows of the sum; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = dy.new_empty(dy.shape[0] * ctx.group.size(), *dy.shape[1:])
        dist.all_gather_into_tensor(out, dy.contiguous(), group=ctx.group)
        return out, None


def scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def make_parameter(placement: Placement, meshes: Meshes | None) -> nn.Parameter:
    """Whole, or this rank's part."""
    if meshes is None:
        return nn.Parameter(torch.empty(placement.global_shape))
    return placed_parameter(torch.empty(placement.local_shape(meshes)), placement, meshes)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        self.v, self.o = nn.Linear(H, H), nn.Linear(H, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [p(x).unflatten(-1, (2, H // 2)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        return self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class SplitMLP(nn.Module):
    def __init__(self, meshes: Meshes | None) -> None:
        super().__init__()
        self.group = meshes.group(Axis.TP) if meshes and meshes.size(Axis.TP) > 1 else None
        self.up = make_parameter(Placement((2 * H, H), ((Axis.TP, Shard(0)),)), meshes)
        self.down = make_parameter(Placement((H, 2 * H), ((Axis.TP, Shard(1)),)), meshes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = Gather.apply(x, self.group) if self.group else x
        y = F.linear(F.silu(F.linear(rows, self.up)), self.down)
        return ScatterSum.apply(y, self.group) if self.group else y


class MoE(nn.Module):
    def __init__(self, meshes: Meshes | None) -> None:
        super().__init__()
        ep, etp = (meshes.size(Axis.EP), meshes.size(Axis.ETP)) if meshes else (1, 1)
        self.group = meshes.group(Axis.EXPERT) if ep * etp > 1 else None
        self.first = E // ep * meshes.rank(Axis.EP) if ep > 1 else 0
        self.gate = nn.Linear(H, E, bias=False)
        cuts = (Axis.EP, Shard(0)), (Axis.ETP, halves(1))
        self.gate_up = make_parameter(Placement((E, 2 * N, H), cuts), meshes)
        self.down = make_parameter(Placement((E, H, N), ((Axis.EP, Shard(0)), (Axis.ETP, Shard(2)))), meshes)
        self.ids: list[torch.Tensor] = []

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x_BSD.flatten(0, 1)
        weights, ids = self.gate(x).softmax(-1).topk(K, dim=-1)
        if torch._C._current_graph_task_id() == -1:  # not again in recomputation
            self.ids.append(ids)
        aux = weights.square().sum()
        if self.group is not None:
            x, weights = Gather.apply(x, self.group), Gather.apply(weights, self.group)
            ids = Gather.apply(ids, self.group) - self.first
            ids = torch.where((ids >= 0) & (ids < self.gate_up.shape[0]), ids, -1)
        y = experts_mlp(Rows(x, weights, ids), ExpertWeights(self.gate_up, self.down))
        if self.group is not None:
            y = ScatterSum.apply(y, self.group)
        return y.view(x_BSD.shape), aux


@dataclasses.dataclass
class BlockOutput:
    x: torch.Tensor
    aux: torch.Tensor


class Block(nn.Module):
    def __init__(self, meshes: Meshes | None, kind: str) -> None:
        super().__init__()
        self.norm, self.norm2, self.norm3 = nn.RMSNorm(H), nn.RMSNorm(H), nn.RMSNorm(H)
        self.attention, self.mlp, self.moe = Attention(), SplitMLP(meshes), MoE(meshes)
        self.kind = kind
        self.fails = False

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norm(x))
        if self.fails:
            raise ValueError("boom")
        x = x + self.mlp(self.norm2(x).flatten(0, 1)).view(x.shape)
        y, aux = self.moe(self.norm3(x))
        if self.kind == "dataclass":
            return BlockOutput(x + y, aux)
        return OrderedDict(x=x + y, aux=aux) if self.kind == "mapping" else (x + y, aux)


class TinyDecoder(nn.Module):
    """Returns the summed loss over ``count``: this rank's share of the global mean."""

    def __init__(
        self,
        meshes: Meshes | None = None,
        *,
        num_layers: int = 3,
        kind: str = "tuple",
        tied: bool = False,
        recompute: str = "none",
        plan: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.layers = nn.ModuleList(Block(meshes, kind) for _ in range(num_layers))
        self.norm = nn.RMSNorm(H)
        self.head = nn.Linear(H, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute, self.plan = recompute, plan or tuple(range(num_layers))

    def run(self, x: torch.Tensor, *indices: int) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.new_zeros(())
        for index in indices:
            out = self.layers[index](x)
            if isinstance(out, tuple):
                x, aux = out
            else:
                x, aux = (out.x, out.aux) if isinstance(out, BlockOutput) else (out["x"], out["aux"])
            total = total + aux
        return x, total

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
        x, aux = self.embed(tokens), 0.0
        step = {"none": 1, "layer": 1, "pairs": 2, "triples": 3, "reentrant": 1}[self.recompute]
        for start in range(0, len(self.plan), step):
            indices = self.plan[start : start + step]
            if self.recompute == "none":
                x, more = self.run(x, *indices)
            else:
                x, more = checkpoint(self.run, x, *indices, use_reentrant=self.recompute == "reentrant")
            aux = aux + more
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return (F.cross_entropy(logits, labels.flatten(), reduction="sum") + 0.1 * aux.float()) / count


@torch.no_grad()
def init_fn(name: str, parameter: torch.Tensor, out: torch.Tensor, at: Meshes | None = None) -> None:
    """The same values whatever the layout: drawn for the global tensor from a seed made of the name."""
    placement = Placement.whole(parameter.shape) if at is None else placement_of(parameter, at)
    generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    value = torch.randn(placement.global_shape, generator=generator) * 0.3
    if len(placement.global_shape) == 1:
        value = value.abs() + 0.5 if "norm" in name else value
    if at is None:
        out.copy_(value)
    else:
        for box in placement.boxes(at):
            box.view_of(out.view(-1)).copy_(box.slice_of(value))


def reference(**options: Any) -> TinyDecoder:
    """The plain model in one process."""
    model = TinyDecoder(**options)
    for name, parameter in model.named_parameters():
        init_fn(name, parameter, parameter.data)
    return model


def batch_of(
    step: int, micro: int, rank: int, rows: int = 2, length: int = 6
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    return tokens, torch.randint(0, VOCAB, (rows, length), generator=generator)
