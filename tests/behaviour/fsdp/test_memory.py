"""A model that no rank could hold is built on the meta device and trained; what is allocated is counted and
held against the dry run's figure."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdmoe.fsdp import FSDPPolicy, fully_shard, plan_memory
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.testing import run_ranks
from tests.support.allocations import count_allocations
from tests.support.fsdp_parity import FP32
from tests.support.saved_activations import saved_activations


@dataclass(frozen=True)
class Shape:
    hidden: int
    num_layers: int
    vocab: int
    num_tokens: int = 64


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = (
            nn.Linear(hidden, 4 * hidden, bias=False),
            nn.Linear(4 * hidden, hidden, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape.hidden) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def initialize(name: str, parameter: torch.Tensor, out: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(len(name))
    out.normal_(0.0, 0.02, generator=generator) if parameter.dim() > 1 else out.fill_(1.0)


def train(model: nn.Module, shape: Shape, steps: int) -> list[float]:
    optimizer, losses = AdamW(model, lr=1e-3), []
    tokens = torch.randint(0, shape.vocab, (1, shape.num_tokens), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses


def warm_up(meshes: Meshes) -> None:
    """Import, connect and run everything once, so that only the model is counted."""
    small = Shape(64, 2, 64)
    train(fully_shard(Decoder(small), meshes, FSDPPolicy(precision=FP32)), small, 2)


def measure(shape: Shape, steps: int) -> dict[str, float]:
    meshes, policy = build_meshes(), FSDPPolicy(precision=FP32)
    warm_up(meshes)
    with torch.device("meta"):
        model = Decoder(shape)
        tokens = torch.zeros(1, shape.num_tokens, dtype=torch.long)
        activations = saved_activations(lambda: model(tokens), model)
    plan = plan_memory(model, meshes.degrees, policy)
    with count_allocations() as allocated:
        fully_shard(model, meshes, policy, init_fn=initialize)
        losses = train(model, shape, steps)
    shards = plan.weights + plan.main_weights + plan.gradients + plan.moments
    return {
        "measured": allocated.peak,
        "planned": plan.total + activations,
        "bound": 1.3 * (shards + plan.gather_slots + activations),
        "whole model": plan.num_parameters * 16,
        "parameters": plan.num_parameters,
        "improvement": losses[0] - losses[-1],
    }


def check(world: int, shape: Shape, steps: int, tolerance: float) -> None:
    for found in run_ranks(measure, world, shape, steps, timeout=900):
        assert found["improvement"] > 0
        assert found["measured"] < found["bound"] < found["whole model"]
        assert found["planned"] == pytest.approx(found["measured"], rel=tolerance)


def test_a_model_is_built_and_trained_in_its_shards_and_two_layers() -> None:
    check(2, Shape(hidden=128, num_layers=12, vocab=1024), steps=2, tolerance=0.05)


@pytest.mark.full
def test_four_ranks_train_0_4_billion_parameters_in_1_3_times_what_they_need() -> None:
    check(4, Shape(hidden=768, num_layers=48, vocab=32_768), steps=2, tolerance=0.10)
