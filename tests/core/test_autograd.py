"""A backward that cannot be differentiated says so, and costs nothing where nobody asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable


class _Square(torch.autograd.Function):
    saw_gradients = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        _Square.saw_gradients = torch.is_grad_enabled()
        return 2 * grad_y * ctx.saved_tensors[0]


def test_a_first_derivative_is_taken_without_a_graph() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    for create_graph in (False, True):
        (first,) = torch.autograd.grad(_Square.apply(x), x, create_graph=create_graph)
        assert first.item() == 6.0
        assert not _Square.saw_gradients


def test_a_second_derivative_is_refused() -> None:
    x, seed = torch.tensor([3.0], requires_grad=True), torch.ones(1, requires_grad=True)
    (first,) = torch.autograd.grad(_Square.apply(x), x, seed, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.backward()
