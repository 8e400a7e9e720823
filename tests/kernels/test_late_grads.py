"""Weight gradients that are left for later: the same ones, computed once the gradients of rows are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import DEFAULT_POLICY, ExpertWeights, Rows
from fsdmoe.kernels.late_grads import later

R, K, E, D, N = 7, 2, 3, 8, 6


def draw() -> tuple[Rows, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(R, D, generator=random, requires_grad=True)
    weights = torch.rand(R, K, generator=random, requires_grad=True)
    ids = torch.randint(-1, E, (R, K), generator=random)
    gate_up = torch.randn(E, 2 * N, D, generator=random, requires_grad=True)
    return Rows(x, weights, ids), gate_up, torch.randn(E, D, N, generator=random, requires_grad=True)


class Sink:
    """Says when it is asked for its buffer."""

    def __init__(self, like: Tensor, said: list[str]) -> None:
        self.buffer, self.said, self.claims = torch.zeros_like(like), said, 0

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        self.said.append("weights")
        self.claims += 1
        return self.buffer, self.claims > 1

    def stage(self) -> None: ...


def run(rows: Rows, gate_up: Tensor, down: Tensor, *, late: bool) -> Tensor:
    gate_up, down, grads = later(gate_up, down) if late else (gate_up, down, None)
    return experts_mlp(rows, ExpertWeights(gate_up, down), DEFAULT_POLICY._replace(late=grads))


def test_they_are_those_that_are_computed_at_once() -> None:
    found = []
    for late in (False, True):
        rows, gate_up, down = draw()
        run(rows, gate_up, down, late=late).square().sum().backward()
        found.append([rows.x_RD.grad, rows.weights_RK.grad, gate_up.grad, down.grad])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_sinks_are_filled_after_the_gradient_of_rows_is_known() -> None:
    (x, weights, ids), gate_up, down = draw()
    said: list[str] = []
    sinks = [Sink(weight, said) for weight in (gate_up, down)]
    gate_up.grad_sink, down.grad_sink = sinks  # type: ignore[attr-defined]
    # Made after the weights' node, as the end of a transfer is.
    gate_up_late, down_late, grads = later(gate_up, down)
    arrived = x * 1.0
    arrived.register_hook(lambda _: said.append("rows"))
    policy = DEFAULT_POLICY._replace(late=grads)
    y = experts_mlp(Rows(arrived, weights, ids), ExpertWeights(gate_up_late, down_late), policy)
    y.square().sum().backward(retain_graph=True)
    assert said == ["rows", "weights", "weights"]
    assert gate_up.grad is None
    once = sinks[0].buffer.clone()
    y.square().sum().backward()
    torch.testing.assert_close(sinks[0].buffer, 2 * once)


def test_a_backward_for_rows_alone_computes_none() -> None:
    rows, gate_up, down = draw()
    y = run(rows, gate_up, down, late=True)
    (dx,) = torch.autograd.grad(y.sum(), rows.x_RD)
    assert dx.shape == rows.x_RD.shape
    assert gate_up.grad is None


@pytest.mark.parametrize("frozen", [0, 1])
def test_nothing_is_left_for_later_where_a_weight_is_frozen(frozen: int) -> None:
    rows, *weights = draw()
    weights[frozen].requires_grad_(False)
    assert later(*weights).grads is None
    run(rows, *weights, late=True).sum().backward()
    assert [weight.grad is None for weight in weights] == [number == frozen for number in range(2)]
