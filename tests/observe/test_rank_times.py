"""Step times by rank, and which rank the others wait for."""

import torch.distributed as dist

from fsdmoe.observe.exposed import exposure
from fsdmoe.observe.rank_times import by_rank, rank_facts, rank_lines, slowest
from fsdmoe.testing import run_ranks

SLOW = exposure([(0, 0.9)], {"all_to_all": [(0.9, 1.0)]})
QUICK = exposure([(0, 0.5)], {"all_to_all": [(0.4, 1.0)]})


def test_the_rank_that_computes_longest_is_the_slowest():
    found = {0: QUICK, 3: SLOW}
    assert slowest(found) == 3
    lines = rank_lines(found, num_steps=2)
    assert lines[0] == "rank 0: 500.0 ms a step, 250.0 computing, 250.0 waiting for traffic, 0.0 idle"
    assert lines[1].endswith("<- slowest")
    facts = rank_facts(found, num_steps=2)
    assert facts["exposed"] == "250.0 of 500.0 ms a step (rank 0): all-to-all 250.0"
    assert facts["slowest rank"].startswith("3, computes 450.0 ms a step")


def test_a_rank_alone_is_not_called_slow():
    assert slowest({0: SLOW}) is None
    assert "slowest rank" not in rank_facts({0: SLOW}, num_steps=1)


def test_ranks_learn_of_each_other_and_those_without_a_profile_are_left_out():
    assert run_ranks(_shared, 2) == [[1], [1]]


def _shared():
    return list(by_rank(SLOW if dist.get_rank() == 1 else None))
