"""Recorded numbers of sick and of well machines: what is named, and what is not."""

from __future__ import annotations

import random

import pytest

from fsdmoe.check.judge import (
    CheckResult,
    Verdict,
    judge_clocks,
    judge_disk,
    judge_folder,
    judge_gradients,
    judge_owners,
    judge_rates,
    judge_versions,
)

HOSTS = ["node0", "node0", "node1", "node1"]


def _rates(*values: float) -> CheckResult:
    return judge_rates("GEMM", "TFLOP/s", {f"rank {rank} (n)": value for rank, value in enumerate(values)})


def test_a_gpu_slowed_by_more_than_thirty_percent_is_named() -> None:
    found = _rates(700.0, 690.0, 480.0, 705.0)
    assert found.verdict is Verdict.SLOW
    assert found.text.startswith("rank 2 (n) 480; median 695")


def test_two_hundred_clean_measurements_raise_no_alarm() -> None:
    chance = random.Random(0)
    found = [_rates(*(700 * chance.uniform(0.93, 1.03) for _ in range(8))) for _ in range(200)]
    assert {each.verdict for each in found} == {Verdict.OK}


def test_clocks_apart_are_named_with_their_host() -> None:
    assert judge_clocks([10.0, 10.001, 10.0, 10.002], HOSTS).verdict is Verdict.OK
    found = judge_clocks([10.0, 10.0, 10.0, 73.5], HOSTS)
    assert found.verdict is Verdict.FAILED
    assert "rank 3 (node1) is +63.5 s off" in found.text


def test_a_folder_that_one_rank_cannot_see_is_named_with_that_rank() -> None:
    assert judge_folder([[0, 1, 2, 3]] * 4, "/runs", HOSTS).verdict is Verdict.OK
    found = judge_folder([[0, 1, 3], [0, 1, 3], [2], [0, 1, 3]], "/runs", HOSTS)
    assert found.verdict is Verdict.FAILED
    assert found.text.startswith("rank 2 (node1) does not see the files of others in /runs")


@pytest.mark.parametrize(
    ("owned", "text"),
    [
        ([{0: 8}, {1: 8}, {2: 8}, {2: 8, 3: 8}],
         "expert 2 is owned more than once: rank 2 (node1), rank 3 (node1)"),
        ([{0: 8}, {1: 8}, {2: 8}, {}], "expert 3 is owned by no rank"),
        ([{0: 8}, {1: 4}, {2: 8}, {3: 8}], "expert 1 is owned not as a whole: rank 1 (node0)"),
    ],
)  # fmt: skip
def test_experts_that_are_not_owned_exactly_once_are_named(owned: list[dict[int, int]], text: str) -> None:
    found = judge_owners(owned, 8, 4, HOSTS)
    assert (found.verdict, found.text) == (Verdict.FAILED, text)


def test_experts_whose_pieces_lie_on_several_ranks_are_owned_once() -> None:
    found = judge_owners([{0: 5}, {0: 3, 1: 8}], 8, 2, HOSTS)
    assert found.verdict is Verdict.OK
    assert "of a small layer of its own" in found.text  # the run's own model has other experts


def test_versions_gradients_and_disk_say_what_differs() -> None:
    assert (
        judge_versions([{"nccl": "2.27"}, {"nccl": "2.26"}]).text
        == "nccl: '2.27' on rank 0, '2.26' on rank 1"
    )
    assert judge_gradients({"a": 1e-7, "b": float("nan")}).verdict is Verdict.FAILED
    assert judge_disk(free=10, needed=20, folder="/runs").verdict is Verdict.FAILED
