"""Learning-rate schedules, by their shape."""

from itertools import pairwise

import pytest

from fsdmoe.optim.config import OptimConfig
from fsdmoe.optim.schedule import learning_rate


def rates(total: int, **changes: object) -> list[float]:
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1, **changes)  # type: ignore[arg-type]
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    assert rates(100, schedule=schedule)[:10] == pytest.approx([0.1 * n for n in range(1, 11)])


def test_cosine_falls_to_the_floor_at_the_last_step() -> None:
    values = rates(110, schedule="cosine")
    assert values[59] == pytest.approx(0.55)  # half way between peak and floor, half way through
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(values[10:]))


def test_wsd_stays_at_the_peak_and_falls_linearly_in_its_last_fraction() -> None:
    values = rates(100, schedule="wsd", decay_fraction=0.2)
    assert set(values[10:80]) == {1.0}
    assert values[89] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1)


def test_no_warm_up_starts_at_the_peak() -> None:
    config = OptimConfig(lr=2.0, warmup_steps=0, schedule="constant")
    assert learning_rate(config, 1, 10) == 2.0
