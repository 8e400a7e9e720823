"""One process equals any layout of eight ranks: every legal factoring into dp_outer, dp_shard, cp, tp and ep,
etp trains each family alike, packed rows included. ``make test`` runs a sample, ``make test-full`` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from fsdmoe.context_parallel.config import Mode
from fsdmoe.mesh import MeshConfig
from fsdmoe.testing import run_ranks
from tests.support.parallel_case import (
    FEW,
    MODELS,
    Layout,
    balance_without_routing,
    compare,
    evaluate_parallel,
    one_process,
    train_parallel,
)

WORLD = 8
MODES: tuple[Mode, ...] = ("ring", "all_to_all", "all_gather")
BOTH = ("sgd", "adamw")


def factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``number`` as an ordered product."""
    sizes = [n for n in range(1, number + 1) if number % n == 0]
    return (each for each in itertools.product(sizes, repeat=parts) if _product(each) == number)


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def layouts() -> Iterator[Layout]:
    """Every legal one; modes, accumulation, recompute and chunks take turns."""
    turn = itertools.count()
    for dp_outer, dp_shard, cp, tp in factorings(WORLD, 4):
        for _, ep, etp in factorings(dp_shard * cp * tp, 3):
            mesh = MeshConfig(dp_outer=dp_outer, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep, etp=etp)
            index = next(turn)
            has_space = dp_outer * dp_shard <= 4
            yield Layout(
                mesh,
                MODES[index % 3],
                micro_batches=2 if has_space and index % 2 else 1,
                recompute=(("layer",), ("norms",), ())[index // 3 % 3],
                chunks=1 + index % 4 % 3,
            )


SAMPLE = [
    # Scaled positions have these meshes too.
    *(
        pytest.param(family, layout, marks=pytest.mark.full)
        for family, layout in (
            ("qwen3_moe", Layout(MeshConfig(tp=2, cp=2, ep=4), "ring", recompute=("norms",))),
            (
                "mixtral",
                Layout(MeshConfig(tp=2, cp=2, ep=2, etp=2), "all_to_all", recompute=("layer",), chunks=3),
            ),
            (
                "qwen3_moe",
                Layout(MeshConfig(dp_outer=2, tp=2, ep=2), shard="optimizer", recompute=("norms",)),
            ),
        )
    ),
    pytest.param("deepseek_v3", Layout(MeshConfig(cp=4, ep=2), "all_gather"), marks=pytest.mark.full),
    ("mixtral", Layout(MeshConfig(tp=2, dp_shard=2, ep=4), shard="grads", micro_batches=2, chunks=2)),
    (
        "deepseek_v3",
        Layout(MeshConfig(cp=2, tp=2, ep=4), "all_to_all", recompute=("layer",), chunks=2),
    ),
    ("qwen3_moe", Layout(MeshConfig(tp=2, ep=2), varlen=True, recompute=("norms",))),
    ("deepseek_v3", Layout(MeshConfig(dp_shard=2, ep=2), varlen=True, micro_batches=2)),
]
# Documents that are longer than the model was trained on, and shorter ones in the same rows.
SCALED = [
    ("gpt_oss", Layout(MeshConfig(cp=2, tp=2, ep=2, etp=2), "ring", recompute=("norms",))),
    *(
        pytest.param(family, layout, marks=pytest.mark.full)
        for family, layout in (
            ("glm4_moe", Layout(MeshConfig(cp=2, ep=2), "ring")),
            ("glm4_moe", Layout(MeshConfig(dp_shard=2, ep=2), micro_batches=2, recompute=("norms",))),
            ("glm4_moe", Layout(MeshConfig(tp=2, cp=2, ep=4), "all_gather", recompute=("layer",))),
            ("glm4_moe", Layout(MeshConfig(dp_shard=4, ep=2), "ring", dynamic=True, max_tokens=6)),
            ("gpt_oss", Layout(MeshConfig(cp=2, ep=2), "all_to_all", recompute=("layer",))),
            ("gpt_oss", Layout(MeshConfig(cp=4, ep=4), "all_gather", micro_batches=2)),
            ("gpt_oss", Layout(MeshConfig(tp=2, ep=2), recompute=("attention", "experts"))),
            ("gpt_oss", Layout(MeshConfig(tp=2, etp=2), varlen=True, recompute=("attention",))),
            ("gpt_oss", Layout(MeshConfig(dp_shard=4, ep=2), "ring", dynamic=True, max_tokens=6)),
            ("qwen3 longrope", Layout(MeshConfig(cp=2, ep=2), "all_to_all", recompute=("norms",))),
            ("qwen3 longrope", Layout(MeshConfig(dp_shard=2), varlen=True, micro_batches=2)),
            ("deepseek_v3 yarn", Layout(MeshConfig(cp=2, tp=2, ep=2), "ring")),
        )
    ),
]


def world_of(mesh: MeshConfig) -> int:
    return mesh.dp_outer * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp


def check(family: str, layout: Layout, steps: int = FEW, optimizers: tuple[str, ...] = ("sgd",)) -> None:
    """SGD sees the scale of gradients, which is what a layout could get wrong. A second loss shows what the
    first gradients did, a third one AdamW's moments."""
    world_size = world_of(layout.mesh)
    courses = run_ranks(train_parallel, world_size, family, layout, steps, optimizers, timeout=300.0)
    for of_rank in courses:
        for optimizer, course in of_rank.items():
            wanted = one_process(family, optimizer, layout.dynamic, layout.num_layers)
            compare(course, wanted, f"{layout}, {family}, {optimizer}")


@pytest.mark.parametrize(("family", "layout"), SAMPLE, ids=str)
def test_a_layout_trains_as_one_process(family: str, layout: Layout) -> None:
    if layout.shard == "params":
        check(family, layout, steps=2)
    else:
        check(family, layout, FEW, BOTH)


@pytest.mark.parametrize(("family", "layout"), SCALED, ids=str)
def test_scaled_positions_are_those_of_one_process(family: str, layout: Layout) -> None:
    check(family, layout, steps=2)


DYNAMIC = [
    pytest.param(
        "qwen3_moe",
        Layout(MeshConfig(dp_shard=4, ep=2), "ring", dynamic=True, max_tokens=6),
        marks=pytest.mark.full,
    ),
    (
        "mixtral",
        Layout(MeshConfig(dp_outer=2, dp_shard=2, ep=2), "all_gather", dynamic=True, max_tokens=10, chunks=3),
    ),
    pytest.param(
        "deepseek_v3",
        Layout(MeshConfig(dp_shard=2, tp=2, ep=4), "all_to_all", dynamic=True, max_tokens=10),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("family", "layout"), DYNAMIC, ids=str)
def test_documents_dealt_to_groups_of_changing_sizes_train_as_one_process(
    family: str, layout: Layout
) -> None:
    check(family, layout)


EVERY = list(layouts())


@pytest.mark.full
@pytest.mark.parametrize("layout", EVERY, ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_every_layout_of_eight_ranks_trains_as_one_process(family: str, layout: Layout) -> None:
    """By AdamW one family of each layout; families take turns."""
    check(family, layout, steps=2)
    if EVERY.index(layout) // 9 % len(MODELS) == list(MODELS).index(family):
        check(family, layout, FEW, ("adamw",))


def test_the_reference_learns() -> None:
    for family in MODELS:
        for optimizer in ("sgd", "adamw"):
            losses = one_process(family, optimizer).losses
            assert max(losses) - min(losses) > 1e-2, (
                "steps must move the loss, or the comparison means nothing"
            )


def test_evaluation_gives_the_same_loss_however_sequences_are_split() -> None:
    layouts = (
        Layout(MeshConfig(cp=2, tp=2, ep=2), "ring"),
        Layout(MeshConfig(dp_outer=2, dp_shard=2), dynamic=True, max_tokens=10, micro_batches=2),
        Layout(MeshConfig(dp_shard=4), micro_batches=2),
    )
    found = [run_ranks(evaluate_parallel, 4, "qwen3_moe", layout) for layout in layouts]
    wanted = run_ranks(evaluate_parallel, 1, "qwen3_moe", Layout(MeshConfig()))[0]
    assert wanted > 3
    for of_layout in found:
        assert of_layout == pytest.approx([wanted] * 4, rel=1e-6)


def test_a_caller_that_says_nothing_of_the_ranks_gets_the_balance_of_whole_sequences() -> None:
    for silent, told in run_ranks(balance_without_routing, 2, "qwen3_moe", Layout(MeshConfig(tp=2))):
        assert silent == pytest.approx(told, rel=1e-6)
