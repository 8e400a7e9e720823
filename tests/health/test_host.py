"""Shares of a host's cores."""

from __future__ import annotations

from fsdmoe.core.rules import ranges_text
from fsdmoe.health.host import share_of_cores


def test_ranks_share_the_cores_next_to_their_gpu_evenly() -> None:
    low, high = set(range(8)), set(range(8, 16))
    near = [low, low, high, high]
    assert [ranges_text(share_of_cores(near, rank)) for rank in range(4)] == ["0-3", "4-7", "8-11", "12-15"]


def test_more_ranks_than_cores_keep_all_of_them() -> None:
    assert share_of_cores([{0, 1}] * 3, 2) == {0, 1}
