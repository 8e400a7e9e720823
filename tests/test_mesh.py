"""Both meshes by membership: who shares which group, from 1 to 1,024 ranks, on a fake process group."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import Axis, Degrees, MeshConfig, Meshes, build_meshes, resolve_degrees
from fsdmoe.testing import run_ranks

DENSE = ("dp_outer", "dp_shard", "cp", "tp")
EXPERT = ("dp_outer", "edp", "ep", "etp")


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def coordinates(rank: int, sizes: tuple[int, ...]) -> list[int]:
    """Row-major coordinates, written apart from the code under test."""
    result = []
    for size in reversed(sizes):
        result.insert(0, rank % size)
        rank //= size
    return result


def members(rank: int, degrees: Degrees, names: tuple[str, ...], varying: set[str]) -> list[int]:
    """Ranks that agree with ``rank`` in every axis of the mesh but the varying ones."""
    sizes = tuple(getattr(degrees, name) for name in names)
    mine = coordinates(rank, sizes)
    return [
        other
        for other in range(degrees.world_size)
        if all(
            a == b or name in varying
            for a, b, name in zip(mine, coordinates(other, sizes), names, strict=True)
        )
    ]


EXPECTED = {
    Axis.DP_OUTER: (DENSE, {"dp_outer"}),
    Axis.DP_SHARD: (DENSE, {"dp_shard"}),
    Axis.CP: (DENSE, {"cp"}),
    Axis.TP: (DENSE, {"tp"}),
    Axis.BATCH: (DENSE, {"dp_outer", "dp_shard"}),
    Axis.FSDP: (DENSE, {"dp_shard", "cp"}),
    Axis.FSDP_TP: (DENSE, {"dp_shard", "cp", "tp"}),
    Axis.LOSS: (DENSE, {"dp_outer", "dp_shard", "cp"}),
    Axis.SEQUENCE: (DENSE, {"cp", "tp"}),
    Axis.WORLD: (DENSE, set(DENSE)),
    Axis.EXPERT_DP_OUTER: (EXPERT, {"dp_outer"}),
    Axis.EDP: (EXPERT, {"edp"}),
    Axis.EP: (EXPERT, {"ep"}),
    Axis.ETP: (EXPERT, {"etp"}),
    Axis.EXPERT: (EXPERT, {"ep", "etp"}),
    Axis.EDP_ETP: (EXPERT, {"edp", "etp"}),
}


def check_membership(meshes: Meshes, rank: int) -> None:
    for axis, (names, varying) in EXPECTED.items():
        expected = members(rank, meshes.degrees, names, varying)
        assert dist.get_process_group_ranks(meshes.group(axis)) == expected, axis
        assert meshes.size(axis) == len(expected)
        assert meshes.rank(axis) == expected.index(rank)


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [
        (1, {}),
        (2, {"ep": 2}),
        (8, {"tp": 2, "cp": 2, "ep": 4}),
        (8, {"tp": 2, "cp": 2, "ep": 2, "etp": 4}),
        (16, {"dp_outer": 2, "cp": 2, "tp": 2, "ep": 8}),
        (24, {"dp_outer": 3, "tp": 2, "ep": 4}),
        (64, {"dp_outer": 4, "tp": 8, "ep": 16}),
        (256, {"tp": 4, "cp": 2, "dp_shard": 32, "ep": 64}),
        (1024, {"dp_outer": 2, "tp": 4, "cp": 2, "ep": 64, "etp": 2}),
    ],
)
def test_every_group_holds_exactly_the_ranks_that_differ_in_its_axes(
    world_size: int, degrees: dict[str, int]
) -> None:
    for rank in {0, 1, world_size // 3, world_size - 1} & set(range(world_size)):
        with fake_rank(rank, world_size):
            check_membership(build_meshes(**degrees), rank)


def test_the_worked_example_of_256_ranks() -> None:
    with fake_rank(5, 256):
        meshes = build_meshes(tp=4, cp=2, dp_shard=32, ep=64)
        assert meshes.degrees == Degrees(dp_outer=1, dp_shard=32, cp=2, tp=4, edp=4, ep=64, etp=1)
        assert dist.get_process_group_ranks(meshes.group(Axis.EP)) == list(range(64))
        assert dist.get_process_group_ranks(meshes.group(Axis.EDP)) == [5, 69, 133, 197]
        assert dist.get_process_group_ranks(meshes.group(Axis.TP)) == [4, 5, 6, 7]


def _real_ranks(degrees: dict[str, int]) -> None:
    check_membership(build_meshes(**degrees), dist.get_rank())


def test_groups_of_real_ranks_match_too() -> None:
    run_ranks(_real_ranks, 8, {"dp_outer": 2, "tp": 2, "ep": 2, "etp": 2})


def test_dense_and_expert_replicas_have_communicators_of_their_own() -> None:
    with fake_rank(0, 8):
        meshes = build_meshes(dp_outer=2, ep=2)
        assert meshes.group(Axis.DP_OUTER) is not meshes.group(Axis.EXPERT_DP_OUTER)


@pytest.mark.parametrize(
    ("changes", "world_size", "named"),
    [
        ({"tp": 3}, 8, "mesh.dp_shard"),
        ({"dp_shard": 4}, 6, "dp_outer\\*dp_shard\\*cp\\*tp = 4"),
        ({"ep": 3}, 8, "mesh.ep"),
        ({"ep": 4, "etp": 4}, 8, "edp\\*ep\\*etp == dp_shard\\*cp\\*tp"),
        ({"dp_outer": 2, "ep": 8}, 8, "choose ep\\*etp from 1, 2, 4"),
    ],
)
def test_an_impossible_mesh_is_refused_with_the_fix(
    changes: dict[str, int], world_size: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve_degrees(MeshConfig(**changes), world_size)


def test_sizes_below_one_are_all_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        MeshConfig(ep=0, tp=-2)
    assert [line.split(":")[0] for line in error.value.problems] == ["mesh.tp", "mesh.ep"]
