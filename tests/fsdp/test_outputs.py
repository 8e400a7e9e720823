"""What modules return, and what backward makes of it."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import FP32, check_gradients, relative
from tests.support.tiny_modules import H


class PassingOn(nn.Module):
    """Returns what it was given beside what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x)), first


class PassingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PassingOn() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x, first = layer(x, first)
            first = x if index == 0 else first
        return x.sum() * 0.0 + first.square().sum()


def pass_inputs_on() -> float:
    torch.manual_seed(0)
    plain, model = PassingModel(), PassingModel()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, build_meshes(), FSDPPolicy(fsdp=FSDPConfig(debug=True), precision=FP32))
    x = torch.ones(2, H)
    model(x).backward()
    plain(x).backward()
    worst = {"dense": 0.0, "expert": 0.0}
    check_gradients(model, plain, worst)
    return worst["dense"]


def test_an_input_that_a_unit_hands_on_does_not_announce_its_backward() -> None:
    assert max(run_ranks(pass_inputs_on, 2)) < 1e-5


class LastLayerIsTheAnswer(nn.Module):
    """Returns what its last unit returned, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def return_a_units_output() -> float:
    torch.manual_seed(1)
    model = LastLayerIsTheAnswer()
    plain = copy.deepcopy(model)
    model = fully_shard(model, build_meshes(), FSDPPolicy(fsdp=FSDPConfig(debug=True), precision=FP32))
    for _ in range(2):
        x = torch.randn(5, H)
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
    worst = 0.0
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        worst = max(worst, relative(ours.grad.full_tensor(), theirs.grad))
    return worst


def test_a_model_may_return_the_output_of_its_last_unit_as_it_is() -> None:
    """The same gradient then announces the unit and the root; the root must not end the unit's backward."""
    assert max(run_ranks(return_a_units_output, 2)) < 1e-5


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> Opaque:
        return Opaque(self.linear(x))


class HidingModel(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hiding() for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(lambda y, layer=layer: layer(y).x, x, use_reentrant=True)
            else:
                x = layer(x).x
        return x.sum()


def refused(recompute: bool) -> str:
    model = fully_shard(HidingModel(recompute), build_meshes(), FSDPPolicy(precision=FP32))
    try:
        model(torch.randn(2, H, requires_grad=True)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_outputs_that_cannot_be_looked_into_are_refused() -> None:
    for message in run_ranks(refused, 2, False):
        assert "not a tuple, list, dict or dataclass" in message


def test_reentrant_checkpointing_is_refused() -> None:
    for message in run_ranks(refused, 2, True):
        assert "use_reentrant=False" in message
