"""Modules and parameters that come into a model after it was sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, fully_shard
from fsdmoe.fsdp.engine import _FORWARDS_PER_LOOK
from fsdmoe.mesh import build_meshes
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded() -> Model:
    torch.manual_seed(0)
    model = Model()
    policy = FSDPPolicy(
        fsdp=FSDPConfig(reshard_after_forward=False), precision=PrecisionConfig(param_dtype="float32")
    )
    fully_shard(model, build_meshes(), policy)
    model(torch.arange(8)).sum().backward()
    return model


def replace_head(model: Model) -> None:
    model.head = nn.Linear(16, 8)


def replace_layer(model: Model) -> None:
    model.layers[1] = nn.Linear(16, 16, bias=False)


def insert_layer(model: Model) -> None:
    model.layers.insert(1, nn.Linear(16, 16, bias=False))


def add_adapter(model: Model) -> None:
    model.layers[0].lora = nn.Linear(16, 2)


def add_parameter(model: Model) -> None:
    model.layers[0].scale = nn.Parameter(torch.ones(16))


def bypass_torch(model: Model) -> None:
    model._modules["head"] = nn.Linear(16, 8)
    for _ in range(_FORWARDS_PER_LOOK):
        model(torch.arange(8))


def fill_bias(model: Model) -> None:
    model.layers[0].bias = nn.Parameter(torch.zeros(16))


CHANGES: dict[Callable[[Model], None], str] = {
    replace_head: "head.weight (and 1 more) came",
    replace_layer: "layers.1.weight came",
    insert_layer: "layers.1.weight came",
    add_adapter: "layers.0.lora.weight (and 1 more) came",
    add_parameter: "layers.0.scale came",
    fill_bias: "layers.0.bias came",
    bypass_torch: "head.weight (and 1 more) came",
}


def what_is_said(change: Callable[[Model], None]) -> str:
    model = sharded()
    try:
        change(model)
        model(torch.arange(8))
    except ConfigError as error:
        return str(error)
    return "it went on"


def say_all() -> list[str]:
    return [what_is_said(change) for change in CHANGES]


def test_what_comes_into_a_sharded_model_is_refused_by_name() -> None:
    for told, named in zip(run_ranks(say_all, 2)[1], CHANGES.values(), strict=True):
        assert named in told
        assert "before parallelize" in told


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def go_on() -> None:
    model = sharded()
    model.layers[0] = Around(model.layers[0])
    bias = model.head.bias.full_tensor()
    doubled = model(torch.arange(8)) - bias
    model.layers[0] = model.layers[0].inner
    model.layers.append(nn.Identity())
    torch.testing.assert_close(2 * (model(torch.arange(8)) - bias), doubled)


def test_modules_without_parameters_of_their_own_come_and_go() -> None:
    run_ranks(go_on, 2)


def write_and_be_refused() -> tuple[torch.Tensor, torch.Tensor]:
    """The output after weights were written and a forward was refused, and what it must be: a new model's."""
    model, other = sharded(), sharded()
    layer, weight = model.layers[1], model.layers[1].weight
    with torch.no_grad():
        model.embed.weight.mul_(3)
        other.embed.weight.mul_(3)
    layer.weight = nn.Parameter(torch.zeros(16, 16))
    with contextlib.suppress(RuntimeError):
        model(torch.arange(8))
    layer.weight = weight
    return model(torch.arange(8)).detach(), other(torch.arange(8)).detach()


def test_weights_that_were_written_before_a_refused_forward_are_taken_up_by_the_next() -> None:
    for found, wanted in run_ranks(write_and_be_refused, 2):
        torch.testing.assert_close(found, wanted)
