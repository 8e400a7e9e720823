"""A node that goes silent with its connections open is noticed, and one that has ended in order is not."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdmoe.core import events
from fsdmoe.core.rank_facts import RankFacts
from fsdmoe.health.flight import place_of_ranks
from fsdmoe.health.heartbeat import Heartbeats, Listener, has_several_nodes
from fsdmoe.testing import RankFailure, run_ranks


def test_a_rank_is_lost_after_twelve_beats_without_a_change() -> None:
    listener = Listener()
    heard = [b"1", b"2", *[b"3"] * 12, b"4", *[b"5"] * 12]
    assert not any(map(listener.is_lost, heard))
    assert listener.is_lost(b"5")


def test_a_store_that_never_answers_is_lost_too() -> None:
    listener = Listener()
    assert [listener.is_lost(None) for _ in range(12)] == [False] * 11 + [True]


def test_a_rank_whose_run_has_ended_may_be_silent() -> None:
    listener = Listener()
    assert not any(listener.is_lost(b"over") for _ in range(50))


@pytest.mark.parametrize(
    ("sizes", "are_several"),
    [(["2", "2"], False), ([None, None], False), (["1", "1"], True), (["1", "2", "2"], True)],
)
def test_heartbeats_are_for_several_nodes_only(sizes: list[str | None], are_several: bool) -> None:
    assert has_several_nodes([RankFacts("cpu", node_size=size) for size in sizes]) is are_several


def _stop(folder: str) -> None:
    beats = Heartbeats(2.4, Path(folder), place_of_ranks())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
    beats.close()


@pytest.mark.full
def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(_stop, 2, str(tmp_path), fresh=True)
    text = (tmp_path / "errors.txt").read_text()
    assert "rank 1 (" in text.partition("has not been heard of for 2.4 s")[0]
    assert [event["event"] for event in events.read(tmp_path)] == ["fault"]


def _end(folder: str) -> list[str]:
    beats = Heartbeats(1000.0, Path(folder), place_of_ranks())
    store = beats._store
    began = [store.get(beats._key(rank)).decode() for rank in range(2)]
    dist.barrier()
    beats.close()
    dist.barrier()
    return began + [store.get(beats._key(rank)).decode() for rank in range(2)]


def test_a_rank_says_that_its_run_has_ended(tmp_path: Path) -> None:
    assert run_ranks(_end, 2, str(tmp_path)) == [["begins", "begins", "over", "over"]] * 2
