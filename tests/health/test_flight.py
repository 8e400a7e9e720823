"""Recorded collectives of several ranks: who never came, and whom the others wait for."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.health.flight import Lateness, entries, explain, lateness, open_collectives, slow_rank
from fsdmoe.testing import run_ranks

PLACES = ["rank 0 (a)", "rank 1 (a)", "rank 2 (b)"]
ALL = [0, 1, 2]


def test_a_rank_that_skipped_a_collective_is_named_with_it() -> None:
    records = {rank: {"0": [18, "all_reduce over ep", True, ALL]} for rank in (0, 1)}
    skipped = records | {2: {"0": [17, "all_gather over ep", False, ALL]}}
    assert explain(skipped, PLACES) == [
        "rank 2 (b) never came to all_reduce over ep (number 18), in which rank 0 (a), rank 1 (a) wait; "
        "it waits in no collective"
    ]


def test_a_rank_that_stopped_is_named() -> None:
    records = {rank: {"0": [18, "all_reduce over ep", True, ALL]} for rank in (0, 1)}
    assert explain(records, PLACES) == ["rank 2 (b) does not answer: it is stopped, or gone"]


def test_ranks_in_different_collectives_of_one_number_are_named() -> None:
    names = ["all_reduce over ep", "all_reduce over ep", "broadcast over ep"]
    records = {rank: {"0": [4, name, True, ALL]} for rank, name in enumerate(names)}
    assert explain(records, PLACES) == [
        "ranks disagree on number 4: broadcast over ep against all_reduce over ep"
    ]


def _skip(looked: Path) -> list[Any]:
    """The last rank leaves out a collective until the first has looked; what the recorder says of it."""
    dist.barrier()
    value = torch.ones(1)
    work = dist.all_reduce(value, async_op=True) if dist.get_rank() == 0 else None
    found = open_collectives(entries())
    if work is None:
        while not looked.exists():
            time.sleep(0.01)
        dist.all_reduce(value)
    else:
        looked.touch()
        work.wait()
    return [list(each) for each in found.values()]


def test_torch_records_the_collective_that_a_rank_waits_in(tmp_path: Path) -> None:
    waiting, other = run_ranks(_skip, 2, tmp_path / "looked")
    assert waiting[0][1:] == ["all_reduce over all ranks", True, [0, 1]]
    assert other[0][0] < waiting[0][0]


def _slowed(share: float, num_steps: int, seed: int) -> tuple[float, str]:
    """Four collectives in each step of a second; rank 1 comes later to the third by ``share`` of a step. All
    of them jitter by a hundredth."""
    chance = random.Random(seed + dist.get_rank())
    second = 10**9
    ends = [step * second + dist.get_rank() * second // 5 for step in range(num_steps + 1)]
    late = share if dist.get_rank() == 1 else 0.0

    def moment(step: int, place: int) -> int:
        return int((step + place / 4 + 0.1 + chance.gauss(0, 0.01) + late * (place == 2)) * second)

    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    found = [
        {
            "process_group": [group, "default_pg"],
            "collective_seq_id": 4 * step + place,
            "profiling_name": "gloo:all_to_all" if place == 2 else "gloo:all_gather",
            "time_created_ns": moment(step, place),
        }
        for step in range(num_steps)
        for place in range(4)
    ]  # fmt: skip
    own = lateness(found, ends)
    return own.seconds, own.where


@pytest.mark.parametrize(("share", "slow"), [(0.3, 1), (0.0, None)])
def test_a_rank_slowed_by_thirty_percent_is_found_and_a_clean_run_raises_no_alarm(
    share: float, slow: int | None
) -> None:
    for seed in range(5):  # 200 steps
        found = [Lateness(*each) for each in run_ranks(_slowed, 3, share, 40, seed)]
        assert slow_rank(found, 1.0) == slow
        if slow is not None:
            assert found[slow].where == "all_to_all over all ranks"
