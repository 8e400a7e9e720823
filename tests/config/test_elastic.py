"""An elastic mesh takes the largest degrees that the ranks at hand allow."""

from dataclasses import replace
from typing import Any

import pytest

from fsdmoe.config import Config, build_config
from fsdmoe.core.axes import MeshConfig
from fsdmoe.launch.ranks import problems_of_fewer
from tests.support.tiny_run import TINY


def elastic(world_size: int, problems: list[str], **mesh: Any) -> Config | None:
    """The tiny run with 8 experts, 4 heads and 2 key-value heads, on so many ranks."""
    train = TINY["train"] | {"micro_batch_size": 1, "global_batch_size": 8}
    return build_config(TINY | {"mesh": {"elastic": True} | mesh, "train": train}, {}, world_size, problems)


@pytest.mark.parametrize(
    ("asked", "world_size", "taken"),
    [
        ({"ep": 4}, 8, {"ep": 4}),
        ({"ep": 4}, 2, {"ep": 2}),
        ({"ep": 4}, 1, {"ep": 1}),
        ({"ep": 4, "tp": 2}, 2, {"ep": 2, "tp": 2}),
        ({"ep": 4, "dp_shard": 8}, 4, {"ep": 4, "dp_shard": -1}),
        ({"dp_outer": 2, "ep": 4}, 4, {"dp_outer": 1, "ep": 4}),
    ],
)
def test_the_largest_divisors_that_fit_are_taken(
    asked: dict[str, int], world_size: int, taken: dict[str, int]
) -> None:
    problems: list[str] = []
    config = elastic(world_size, problems, **asked)
    assert config is not None, problems
    assert config.mesh == MeshConfig(elastic=True, **taken)


def test_ranks_over_which_no_batch_can_be_divided_are_refused_by_name() -> None:
    problems: list[str] = []
    assert elastic(3, problems, ep=2) is None
    assert any(line.startswith("train.global_batch_size: 8 sequences") for line in problems), problems


def test_numbers_of_hosts_that_a_run_could_not_go_on_with_are_named() -> None:
    config = elastic(4, [], ep=2)
    assert config is not None
    assert problems_of_fewer(config, (1, 2), 1) == []
    (line,) = problems_of_fewer(config, (1, 2, 3), 1)
    assert line.startswith("--nnodes (--nodes): with 3 hosts of 1 ranks: mesh.ep: ")
    config = elastic(4, [], ep=1)
    assert config is not None
    (line,) = problems_of_fewer(config, (1, 2, 3), 1)
    assert line.endswith("; 12 is one for each number of hosts")
    larger = replace(config, train=replace(config.train, global_batch_size=12))
    assert problems_of_fewer(larger, (1, 2, 3), 1) == []
