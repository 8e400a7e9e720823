"""What ranks find for themselves is agreed on, or refused in the same words on all of them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from fsdmoe.core import rank_facts
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rank_facts import RankFacts, nodes_of, require_one_capability
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks


def told(*node_sizes: str | None) -> list[RankFacts]:
    return [RankFacts("cpu", (), size) for size in node_sizes]


def test_nodes_may_have_different_sizes_and_need_not_be_full() -> None:
    assert nodes_of(told(None, None, None)) == [0, 0, 0]
    assert nodes_of(told("2", "2", "2", "2")) == [0, 0, 1, 1]
    assert nodes_of(told("2", "2", "2")) == [0, 0, 1], "a node of which a rank does not take part"
    assert nodes_of(told("3", "3", "3", "1", "2", "2")) == [0, 0, 0, 3, 4, 4]


@pytest.mark.parametrize(
    "node_sizes", [("2", "4", "2", "4"), ("2", "2", "4", "4"), (None, "1"), ("0", "0"), ("-1", "2"), ("", "")]
)
def test_sizes_that_fit_no_nodes_are_refused(node_sizes: tuple[str | None, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^LOCAL_WORLD_SIZE: expected .* on rank.*; start all ranks alike"):
        nodes_of(told(*node_sizes))


def test_a_recipe_refuses_gpus_of_several_kinds() -> None:
    one, other = RankFacts("cuda", (9, 0)), RankFacts("cuda", (8, 0))
    require_one_capability([one, one], "precision.recipe")
    with pytest.raises(
        ConfigError, match=r"precision\.recipe: .* got '9\.0' on ranks 0, 2, '8\.0' on rank 1;"
    ):
        require_one_capability([one, other, one], "precision.recipe")


def _refusal() -> str:
    rank = dist.get_rank()
    versions = {"torch": "2.11.0", "transformers": f"5.{17 + rank}.0"}
    try:
        with mock.patch.object(rank_facts, "_versions", return_value=versions):
            build_meshes(ep=1 + rank)
    except ConfigError as error:
        return str(error)
    return "built"


def test_other_degrees_and_other_packages_are_named_on_all_ranks() -> None:
    (found,) = set(run_ranks(_refusal, 2))
    fix = "give all ranks the same arguments, devices of one kind and one installation"
    assert found.splitlines() == [
        f"mesh.edp: expected the same on all ranks, got 2 on rank 0, 1 on rank 1; {fix}",
        f"mesh.ep: expected the same on all ranks, got 1 on rank 0, 2 on rank 1; {fix}",
        f"transformers: expected the same on all ranks, got '5.17.0' on rank 0, '5.18.0' on rank 1; {fix}",
    ]
