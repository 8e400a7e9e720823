"""What features do around each training step."""

import pytest
import torch

from fsdmoe.parallel.step_duties import SeedDuty


def drawn(monkeypatch: pytest.MonkeyPatch, rank: int, process_seed: int, steps: list[int]) -> list[float]:
    """What a rank draws first in each of these steps."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    torch.manual_seed(process_seed)
    duty = SeedDuty(seed=3)
    found = []
    for step in steps:
        duty.begin(step)
        found.append(torch.rand(()).item())
    return found


def test_a_step_draws_by_seed_step_and_rank_whatever_was_drawn_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = [drawn(monkeypatch, rank, 1, [0, 1, 2]) for rank in (0, 1)]
    resumed = [drawn(monkeypatch, rank, 2, [1, 2]) for rank in (0, 1)]
    assert [each[1:] for each in one] == resumed
    assert len({value for rank in one for value in rank}) == 6, "other ranks and steps draw otherwise"
