"""One process == any layout: steps of SGD in fp32 (20 in the large matrix, 3 in the others),
per-parameter gradients at the first and the last."""

import itertools
from dataclasses import replace

import pytest

from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, train_case

TOLERANCE = 1e-5

LAYOUTS = {
    "one rank": (1, Case()),
    "two ranks": (2, Case()),
    "accumulation": (2, Case(micro_batches=2)),
    "accumulation, reduced at the last micro-batch": (2, Case(micro_batches=2, fsdp={"reduce": "last"})),
    "gradients sharded, weights whole": (2, Case(micro_batches=2, fsdp={"shard": "grads"})),
    "optimizer state sharded only": (2, Case(micro_batches=2, fsdp={"shard": "optimizer"})),
    "weights kept after forward": (2, Case(fsdp={"reshard_after_forward": False})),
    "recomputed layers": (2, Case(model={"recompute": "layer"})),
    "experts split": (4, Case(degrees={"ep": 2})),
    "experts fill the world": (2, Case(degrees={"ep": 2}, micro_batches=2)),
    "tp folded into ep": (4, Case(degrees={"tp": 2, "ep": 4})),
    "experts split inside": (4, Case(degrees={"ep": 2, "etp": 2, "cp": 2})),
    "replicas": (4, Case(degrees={"dp_outer": 2}, micro_batches=2)),
    "replicas that are not told of the last micro-batch": (
        4,
        Case(degrees={"dp_outer": 2, "ep": 2}, micro_batches=2, passes_last=False),
    ),
    "eight ranks, replicas, experts split, recomputed": (
        8,
        Case(degrees={"dp_outer": 2, "ep": 2}, micro_batches=2, model={"recompute": "layer"}, steps=3),
    ),
}


def check(world_size: int, case: Case) -> None:
    for worst in run_ranks(train_case, world_size, case, timeout=300):
        assert worst["dense"] < TOLERANCE
        assert worst["expert"] < TOLERANCE
        assert worst["loss"] < TOLERANCE


# In the matrix, but for the order of the micro-batches; or a part of a larger layout, here or in
# test_parallel_layouts.py.
IN_FULL = ("optimizer state sharded only", "recomputed layers", "experts split", "experts fill the world",
           "accumulation", "replicas", "tp folded into ep",
           "eight ranks, replicas, experts split, recomputed")  # fmt: skip


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full) if name in IN_FULL else name for name in LAYOUTS]
)
def test_a_layout_trains_like_one_process(layout: str) -> None:
    world_size, case = LAYOUTS[layout]
    check(world_size, replace(case, steps=3))


MATRIX = [
    (world, degrees, micro_batches, recompute, shard)
    for world, degrees in [
        (1, {}), (2, {}), (2, {"ep": 2}), (4, {}), (4, {"ep": 2}), (4, {"dp_outer": 2}),
        (4, {"dp_outer": 2, "ep": 2}), (8, {}), (8, {"ep": 4}), (8, {"dp_outer": 2}),
        (8, {"dp_outer": 2, "ep": 2}),
    ]
    for micro_batches, recompute, shard in itertools.product(
        (1, 2), ("none", "layer"), ("params", "grads", "optimizer")
    )
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("world", "degrees", "micro_batches", "recompute", "shard"), MATRIX)
def test_every_combination_trains_like_one_process(
    world: int, degrees: dict[str, int], micro_batches: int, recompute: str, shard: str
) -> None:
    case = Case(
        degrees=degrees, micro_batches=micro_batches, model={"recompute": recompute}, fsdp={"shard": shard}
    )
    check(world, case)
