"""Ranks that wait for the busiest one are told about, once."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.observe.busy_ranks import WINDOW, BusyRanks, busiest_rank


def test_the_busiest_rank_of_each_layer_counts() -> None:
    loads = {"a": torch.tensor([4.0, 2, 1, 1]), "b": torch.tensor([1.0, 2, 3, 2]), "c": torch.zeros(4)}
    assert busiest_rank(loads, 2, 4) == pytest.approx((1.5 + 1.25) / 2)
    assert busiest_rank(loads, 4, 4) == pytest.approx((2 + 1.5) / 2)
    assert busiest_rank({"c": torch.zeros(4), "d": torch.full((4,), torch.nan)}, 2, 4) is None
    assert busiest_rank({"with two of no rank": torch.tensor([2.0, 2, 2, 2, 9, 9])}, 2, 4) == 1
    assert busiest_rank(loads, 2, 1) == busiest_rank(loads, 2, 4), "the configuration does not say how many"
    assert busiest_rank({"not of so many ranks": torch.ones(5)}, 2, 1) is None


def test_a_run_is_told_once_and_only_where_something_can_be_done() -> None:
    watch = BusyRanks(8, "do this")
    said = [watch.add(1.5) for _ in range(3 * WINDOW)]
    assert [number for number, text in enumerate(said, 1) if text is not None] == [WINDOW]
    assert said[WINDOW - 1] == (
        "the busiest of 8 EP ranks was sent 1.50 times the mean of a layer in the last 20 logged steps, and "
        "the others waited: do this"
    )
    assert not any(BusyRanks(8, "").add(3.0) for _ in range(2 * WINDOW))
    even = BusyRanks(8, "do this")
    assert not any(even.add(share) for share in (1.0, 1.2, None) for _ in range(WINDOW))
    assert even.add(2.3), "the last steps alone count"
