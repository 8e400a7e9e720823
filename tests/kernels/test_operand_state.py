"""Delayed scales of one projection, and what is counted of its operands."""

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.formats import E4M3, Recipe, Scaling
from fsdmoe.kernels.fp8_linear import fp8_linear
from fsdmoe.kernels.operand_state import (
    LOWEST_EXPONENT,
    NUM_SHARES,
    OperandState,
    OperandStatistics,
    Watch,
    register_history,
    watch_of,
)
from fsdmoe.kernels.quantized_linear import quantized_linear
from fsdmoe.precision.recipes import build_recipe

WHOLE = Scaling(E4M3, (None, None), delayed=True)


def new_state() -> OperandState:
    owner = nn.Module()
    register_history(owner, 2)
    return OperandState("layer", owner, 2, is_delayed=True)


def roll(state: OperandState) -> None:
    """As one rank does at the end of a step."""
    assert state.amax is not None
    state.history.copy_(torch.cat((state.amax[:, None], state.history[:, :-1]), 1))
    state.known |= state.noted
    state.discard()


def test_a_scale_follows_from_the_largest_of_the_steps_before() -> None:
    state, x = new_state(), torch.tensor([[1.0, -7.0]])
    scales = state.scales("input", x, WHOLE)
    assert scales is not None
    assert scales.item() == pytest.approx(7 / 448), "of what it is, before the first step"
    watch = Watch(state, True)
    for factor in (1.0, 3.0, 0.1):
        watch.note("input", factor * x)
        assert state.scales("input", x, WHOLE).item() > 0  # type: ignore[union-attr]
        roll(state)
    assert state.scales("input", 100 * x, WHOLE).item() == pytest.approx(21 / 448)  # type: ignore[union-attr]
    own = state.scales("grad", x, WHOLE)
    assert own is not None
    assert own.item() == pytest.approx(7 / 448), "no step had gradients yet"
    assert state.scales("input", x, Scaling(E4M3, (1, None))) is None
    with torch.no_grad():
        watch_of(state).note("input", x)
    assert not state.noted, "evaluation is not taken down"
    assert state.amax is not None
    assert not state.amax.any()


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def recipes() -> dict[str, Recipe]:
    found = {"fast": build_recipe("fp8_fast"), "tensorwise": build_recipe("fp8_tensorwise", delayed=True)}
    return {name: recipe for name, recipe in found.items() if recipe is not None}


@pytest.mark.parametrize("name", ["fast", "tensorwise"])
def test_products_in_fp8_have_the_scales_and_magnitudes_of_the_emulation(name: str) -> None:
    recipe = recipes()[name]
    states, weight = (new_state(), new_state()), draw(16, 32, seed=1)
    for number in range(3):
        x, dy = draw(24, 32, seed=number) * (number + 1), draw(24, 16, seed=number) * 1e-3 * (number + 1)
        results = []
        for function, state in zip((fp8_linear, quantized_linear), states, strict=True):
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = function(*leaves, recipe, watch_of(state))
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
            roll(state)
        for one, other in zip(*results, strict=True):
            assert ((one - other).norm() / other.norm()).item() < 1e-6
        assert torch.equal(states[0].history, states[1].history)
        assert states[0].history[:, 0].tolist() == [x.abs().max().item(), dy.abs().max().item()]
    current = quantized_linear(x, weight, recipe)
    assert torch.equal(current, y) == (name == "fast"), "its inputs have a scale a token, never an old one"


def test_what_is_lost_and_what_is_clipped_is_counted() -> None:
    found = OperandStatistics(torch.device("cpu"))
    x = torch.tensor([[448.0, 896.0, 2.0**-12, 0.0], [1.0, -449.0, 2.0**-9, 100.0]])
    found.add("grad", x, WHOLE, torch.ones(1, 1))
    assert found.counts[1, :NUM_SHARES].tolist() == [8, 1, 2]
    assert found.counts[1, NUM_SHARES - LOWEST_EXPONENT].item() == 1, "one scale of 2^0"
    assert found.amax.tolist() == [0, 896, 0]
    found.add("input", x, Scaling(E4M3, (1, None)), None)
    assert found.counts[0, :NUM_SHARES].tolist() == [8, 1, 0], "scales of its own clip nothing"
    assert found.counts[0, NUM_SHARES:].sum().item() == 2
    found.add("input", torch.zeros(3, 4), Scaling(E4M3, (1, None)), None)
    assert found.counts[0, NUM_SHARES:].sum().item() == 2, "blocks of zeros have no scale"


def test_weights_alone_can_be_loaded() -> None:
    layer, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    register_history(layer, 1)
    layer.amax_history.fill_(3.0)  # type: ignore[operator, union-attr]
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)
    assert layer.amax_history.eq(3).all()  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"weight": plain.weight})
