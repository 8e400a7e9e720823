"""A small model, the ways in which torch splits it over ``tp``, and its training beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import Axis, Meshes

VOCAB, HIDDEN, WIDTH, ROWS, LENGTH = 24, 16, 32, 2, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """The loss of this rank's rows, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class OwnLayer(Layer):
    """A module that is written for DTensors: cut weights, a norm on the rank's own tokens, and a bias of$
    which each rank adds a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self.up.weight.device_mesh
        mine = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        parts = [p.to_local(grad_placements=[Partial()]) for p in (self.norm.weight, self.norm.bias)]
        mine = F.layer_norm(mine, (HIDDEN,), *parts)
        whole = DTensor.from_local(mine, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        up = F.gelu(F.linear(whole, self.up.weight, self.up.bias))
        out = F.linear(up, self.down.weight).redistribute(placements=[Replicate()])
        bias = self.down.bias.redistribute(placements=[Shard(0)]).to_local()
        out = out.redistribute(placements=[Shard(2)]).to_local() + bias
        return x + DTensor.from_local(out, mesh, [Shard(2)]).full_tensor()


def by_stock_styles(model: Model, mesh: DeviceMesh) -> None:
    """Norms and the embedding are left alone: plain parameters on tokens that every rank has."""
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(2):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def by_sequence_styles(model: Model, mesh: DeviceMesh) -> None:
    """Between the layers each rank has its own tokens: gradients of norms and of biases are partial."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {
            f"layers.{i}.norm": SequenceParallel(use_local_output=True),
            f"layers.{i}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"layers.{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(model, mesh, plan)


def by_prepared_input(model: Model, mesh: DeviceMesh) -> None:
    """DTensors between the modules of a layer, embedding columns cut, one linear layer of two."""
    plan: dict[str, Any] = {"embed": ColwiseParallel(output_layouts=Replicate())}
    for i in range(2):
        plan |= {
            f"layers.{i}.norm": SequenceParallel(),
            f"layers.{i}": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),), use_local_output=True
            ),
        }
        plan[f"layers.{i}.up"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        plan[f"layers.{i}.down"] = RowwiseParallel()
    for layer in model.layers:
        layer.norm.register_forward_pre_hook(_own_tokens(mesh))
    parallelize_module(model, mesh, plan)


def _own_tokens(mesh: DeviceMesh) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        whole = DTensor.from_local(args[0], mesh, [Replicate()])
        return (whole.redistribute(placements=[Shard(1)]).to_local(),)

    return hook


def by_distribute_tensor(model: Model, mesh: DeviceMesh) -> None:
    """No styles: parameters are distributed by hand."""
    cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for layer in model.layers:
        layer.__class__ = OwnLayer
        for name, parameter in list(layer.named_parameters()):
            path, _, attribute = name.rpartition(".")
            made = distribute_tensor(parameter.detach(), mesh, [cuts.get(name, Replicate())])
            layer.get_submodule(path).register_parameter(attribute, nn.Parameter(made))


WAYS = {f.__name__: f for f in (by_stock_styles, by_sequence_styles, by_prepared_input, by_distribute_tensor)}


def build(seed: int = 0) -> Model:
    """Random everywhere: biases of zero and norms of one hide mistakes."""
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens_of(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)


def relative(value: torch.Tensor, target: torch.Tensor) -> float:
    assert value.shape == target.shape
    assert torch.isfinite(value).all()
    return ((value - target).abs().max() / target.abs().max().clamp_min(1e-12)).item()


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    return model(tokens_of(step, part))


def train_beside(
    model: nn.Module,
    plain: nn.Module,
    meshes: Meshes,
    optimizer: str,
    *,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
    num_steps: int = 3,
    num_parts: int = 2,
) -> dict[str, float]:
    """Train both on the same parts of the data; the worst relative difference of losses and weights, and by
    parameter of gradients."""
    mine, theirs = optimizer_of(optimizer, model), optimizer_of(optimizer, plain)
    worst = dict.fromkeys(("loss", "weights", *(n for n, _ in plain.named_parameters())), 0.0)
    own = range(meshes.rank(Axis.BATCH), num_parts, meshes.size(Axis.BATCH))
    for step in range(num_steps):
        losses = []
        for part in range(num_parts):
            loss = loss_of(plain, step, part)
            (loss / num_parts).backward()
            losses.append(loss.detach())
        for index, part in enumerate(own):
            with engine_of(model).micro_batch(last=index == len(own) - 1):
                loss = loss_of(model, step, part)
                (loss / len(own)).backward()
            worst["loss"] = max(worst["loss"], relative(loss.detach(), losses[part]))
        wanted = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.shape == wanted[name].shape
            worst[name] = max(worst[name], relative(parameter.grad.full_tensor(), wanted[name].grad))
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
    for name, parameter in model.named_parameters():
        worst["weights"] = max(worst["weights"], relative(parameter.full_tensor(), wanted[name]))
    return worst
