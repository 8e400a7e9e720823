"""Projections around an exchange of tokens give what the whole module gives in one process."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fsdmoe.kernels.linear import Linear
from fsdmoe.mesh import build_meshes
from fsdmoe.models.projections import input_projections, output_projection
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan, parallelize_tensors
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors

ROWS, LENGTH, HIDDEN, WIDTH = 3, 8, 12, 16


class Gated(nn.Module):
    """Two projections of one gathered input, one that scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Linear(HIDDEN, WIDTH)
        self.up = Linear(HIDDEN, WIDTH)
        self.down = Linear(WIDTH, HIDDEN)
        self.tensor = TensorGroup()

    def tensor_plan(self) -> TensorPlan:
        return {
            "gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0,
            "down.weight": 1, "down.bias": "tokens",
        }  # fmt: skip

    def forward(self, x_BsD: Tensor) -> Tensor:
        gate, up = input_projections(x_BsD, (self.gate, self.up), self.tensor)
        return output_projection(self.down, gate.tanh() * up, self.tensor)


def compare_with_the_whole() -> None:
    torch.manual_seed(0)
    whole = Gated()
    split = copy.deepcopy(whole)
    parallelize_tensors(split, build_meshes(tp=2))
    use_local_tensors(split)
    x = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    own = split.tensor.own(x).clone().requires_grad_()
    wanted = whole(x)
    wanted.square().sum().backward()
    found = split(own)
    found.square().sum().backward()
    torch.testing.assert_close(found, split.tensor.own(wanted))
    torch.testing.assert_close(own.grad, split.tensor.own(x.grad))
    for name, parameter in whole.named_parameters():
        gradient = split.get_parameter(name).grad
        dim = split.tensor_plan()[name]
        if isinstance(dim, int):
            torch.testing.assert_close(gradient, parameter.grad.chunk(2, dim)[split.tensor.rank])
        else:  # of this rank's tokens
            torch.testing.assert_close(split.tensor.all_reduce(gradient), parameter.grad)


def test_outputs_and_gradients_are_those_of_the_whole_module() -> None:
    run_ranks(compare_with_the_whole, 2)
