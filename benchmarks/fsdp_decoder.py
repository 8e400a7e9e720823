"""The decoder that the sharding benchmarks run under every contender: plain torch.nn, Qwen3-MoE shapes.

The same code serves the unsharded model, FSDP2 and fsdmoe. Its layers hand weight gradients to a sink where
a parameter has one and to autograd otherwise. With ``ep`` ranks a layer holds ``num_experts / ep`` experts
and computes as many rows as it receives in a balanced run: the ids of this rank's own tokens, taken
modulo the experts it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe.core.placement import Placement, placed_parameter
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.kernels.linear import Embedding, Linear
from fsdmoe.kernels.rms_norm import RMSNorm
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.head import LMHead

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Qwen3-30B-A3B by default."""

    num_layers: int = 8
    hidden: int = 2048
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    num_experts: int = 128
    top_k: int = 8
    expert_width: int = 768
    vocab: int = 151_936
    batch: int = 4
    length: int = 4096


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden, width, bias=False)
        self.k_proj = Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = Linear(width, shape.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(shape.head_dim, EPS), RMSNorm(shape.head_dim, EPS)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        heads = (-1, self.shape.head_dim)
        q = self.q_norm(self.q_proj(x_BSD).unflatten(-1, heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BSD).unflatten(-1, heads)).transpose(1, 2)
        v = self.v_proj(x_BSD).unflatten(-1, heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A module of its own, so that FSDP2 can be given another mesh for it."""

    def __init__(self, shape: Shape, ep: int) -> None:
        super().__init__()
        num_local = shape.num_experts // ep
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * shape.expert_width, shape.hidden))
        self.down = nn.Parameter(torch.empty(num_local, shape.hidden, shape.expert_width))

    def forward(self, x_TD: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        rows = Rows(x_TD, weights_TK, ids_TK % self.gate_up.shape[0])
        return experts_mlp(rows, ExpertWeights(self.gate_up, self.down))


class Layer(nn.Module):
    def __init__(self, shape: Shape, ep: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(shape.hidden, EPS), RMSNorm(shape.hidden, EPS)
        self.attention = Attention(shape)
        spec = RouterSpec(num_experts=shape.num_experts, top_k=shape.top_k, norm_topk=True)
        self.router = Router(spec, shape.hidden)
        self.experts = Experts(shape, ep)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.input_norm(x_BSD))
        x_TD = self.post_norm(x_BSD).flatten(0, 1)
        routing = self.router(x_TD)
        return x_BSD + self.experts(routing.x_TD, routing.weights_TK, routing.ids_TK).view_as(x_BSD)


class Decoder(nn.Module):
    def __init__(self, shape: Shape, ep: int = 1) -> None:
        super().__init__()
        self.embed = Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, ep) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden, EPS)
        self.head = LMHead(shape.hidden, shape.vocab)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(self.norm(x_BSD), tokens_BS, divisor=tokens_BS.numel())


def place_experts(model: Decoder, meshes: Meshes) -> None:
    """Say which of all experts this rank's are, as ``fsdmoe.fsdp.fully_shard`` wants it."""
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        for name, local in list(experts.named_parameters()):
            whole = (local.shape[0] * meshes.size(Axis.EP), *local.shape[1:])
            placement = Placement(whole, ((Axis.EP, Shard(0)),))
            experts.register_parameter(name, placed_parameter(local.detach(), placement, meshes))


@torch.no_grad()
def initialize(name: str, parameter: torch.Tensor, out: torch.Tensor) -> None:
    """Small normal weights, norms of one."""
    out.normal_(0.0, 0.02) if parameter.dim() > 1 else out.fill_(1.0)
