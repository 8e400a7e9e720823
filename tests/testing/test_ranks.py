"""The harness itself: results by rank, failures named, hangs ended, later cases unharmed."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from fsdmoe.testing import RankFailure, ranks, run_ranks


def _sum_of_ranks(scale: int) -> tuple[int, float, int]:
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def _die() -> None:
    if dist.get_rank() == 0:
        os._exit(17)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers_in_order(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, world_size, 10)
    expected = 10.0 * sum(range(world_size))
    assert [rank for rank, _, _ in results] == list(range(world_size))
    assert {total for _, total, _ in results} == {expected}


def test_ranks_are_reused_between_cases() -> None:
    first = {pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1)}
    second = {pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1)}
    assert first == second
    assert first.isdisjoint(pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1, fresh=True))


def test_a_failure_names_the_rank_and_the_next_case_runs() -> None:
    with pytest.raises(RankFailure, match=r"^rank 1 of 2 failed: (.|\n)*broken on purpose"):
        run_ranks(_fail_on_rank_one, 2)
    assert len(run_ranks(_sum_of_ranks, 2, 1)) == 2


def test_a_hang_is_ended_and_named() -> None:
    with pytest.raises(RankFailure, match=r"no answer from rank\(s\) \[0"):
        run_ranks(_hang_on_rank_zero, 2, timeout=1.0)


def test_a_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 failed: it died with exit code 17"):
        run_ranks(_die, 2)


def test_ranks_that_gathered_too_many_threads_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_THREADS", 0)
    first = {pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1)}
    assert first.isdisjoint(pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1))
