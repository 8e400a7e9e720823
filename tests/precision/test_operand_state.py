"""What is counted of a projection's operands."""

import torch

from fsdmoe.precision.formats import E2M1, E4M3, Scaling
from fsdmoe.precision.operand_state import (
    LOWEST_EXPONENT,
    NUM_SHARES,
    OperandState,
    OperandStatistics,
    watch_of,
)

ROW = Scaling(E4M3, (1, None))


def test_what_is_lost_and_the_exponents_of_scales_are_counted() -> None:
    found = OperandStatistics(torch.device("cpu"))
    x = torch.tensor([[448.0, 2.0**-12, 0.0], [-896.0, 1.0, 100.0]])
    found.add("grad", x, ROW)
    assert found.counts[1, :NUM_SHARES].tolist() == [6, 1, 0]
    assert found.counts[1, NUM_SHARES - LOWEST_EXPONENT :][:2].tolist() == [1, 1], "scales of 2^0 and 2^1"
    assert found.amax.tolist() == [0, 896, 0]
    found.add("grad", torch.zeros(3, 4), ROW)
    assert found.counts[1, NUM_SHARES:].sum().item() == 2, "blocks of zeros have no scale"


def test_a_scale_in_few_bits_that_is_rounded_down_clips() -> None:
    found = OperandStatistics(torch.device("cpu"))
    # The second block's scale would be 231 / 448 of the first one's: E4M3 holds 224 and 240.
    x = torch.tensor([[6.0, 3.0, 6.0 * 231 / 448, 1.0]])
    found.add("input", x, Scaling(E2M1, (1, 2), "two_level"))
    assert found.counts[0, :NUM_SHARES].tolist() == [4, 0, 1]


def test_only_training_forwards_of_steps_that_were_asked_for_are_counted() -> None:
    state = OperandState("layer")
    watch_of(state).collect("input", torch.ones(2, 4), ROW)
    assert state.statistics is None
    state.collects = True
    with torch.no_grad():
        watch_of(state).collect("input", torch.ones(2, 4), ROW)
    assert state.statistics is None
    watch_of(state).collect("input", torch.ones(2, 4), ROW)
    assert state.statistics is not None
    assert state.statistics.counts[0, 0] == 8
