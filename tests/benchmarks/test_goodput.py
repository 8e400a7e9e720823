"""The simulation of goodput."""

from __future__ import annotations

import pytest

from benchmarks.goodput import Times, mean_result, simulate


def test_copies_in_memory_keep_nearly_all_time_at_the_failure_rate_of_32768_gpus() -> None:
    times = Times()
    assert mean_result(times, 32_768, in_memory=True).goodput >= 0.95
    assert (
        mean_result(times, 32_768, in_memory=True).goodput
        > mean_result(times, 32_768, in_memory=False).goodput
    )


def test_without_failures_only_copies_cost_time() -> None:
    times = Times(hours_between=1e12)
    copy = times.copy(4096)
    expected = times.interval / (times.interval + copy)
    assert simulate(times, 4096, in_memory=False).goodput == pytest.approx(expected)
    assert simulate(times, 4096, in_memory=True).goodput == pytest.approx(expected * 10 / (10 + copy))
