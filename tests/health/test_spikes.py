"""Which losses are spikes."""

from __future__ import annotations

import random

from fsdmoe.health.spikes import Spikes


def _falling(count: int) -> list[float]:
    chance = random.Random(1)
    return [3 + 5 * 0.98**step + chance.gauss(0, 0.05) for step in range(count)]


def test_two_hundred_losses_of_a_clean_run_hold_no_spike() -> None:
    spikes = Spikes(10.0)
    assert not any(spikes.is_spike(loss) for loss in _falling(200))


def test_a_jump_is_a_spike_and_does_not_become_usual() -> None:
    spikes = Spikes(10.0)
    for loss in _falling(200):
        spikes.is_spike(loss)
    assert [spikes.is_spike(9.0) for _ in range(40)] == [True] * 40
    spikes.clear()
    assert not spikes.is_spike(9.0)
