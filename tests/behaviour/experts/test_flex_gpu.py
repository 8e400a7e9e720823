"""``flex`` through its kernels: four processes on one GPU that write into each other's memory.

One GPU gives each process its share of time, so a barrier of four takes milliseconds here: right for
numbers, waits and failures, meaningless for speed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdmoe.testing import requires_nccl
from tests.support.flex_gpu_ranks import CHECKS
from tests.support.one_gpu import run_ranks_on_one_gpu

pytestmark = requires_nccl
WORLD_SIZE = 4


CLONE_CHECKS = ("clones", "clones_bf16", "clones_fp8", "clones_graph", "clones_model")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of each check on each rank, in a file of its own."""
    names = [name for name in CHECKS if name not in CLONE_CHECKS]
    return run_checks(tmp_path_factory.mktemp("flex"), *names)


@pytest.fixture(scope="module")
def clone_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of checks of clones, in processes of their own: together they would take too long."""
    return run_checks(tmp_path_factory.mktemp("clones"), *CLONE_CHECKS)


def run_checks(folder: Path, *names: str) -> Path:
    try:
        print(run_ranks_on_one_gpu(WORLD_SIZE, "-m", "tests.support.flex_gpu_ranks", str(folder), *names))
    except AssertionError as error:
        (folder / "printed").write_text(str(error))
    return folder


def check(results: Path, name: str) -> None:
    files = [results / f"{name}.{rank}" for rank in range(WORLD_SIZE)]
    problems = [file.read_text() for file in files if file.exists()]
    printed = results / "printed"
    assert not any(problems), "\n".join(problems)
    assert len(problems) == WORLD_SIZE, printed.read_text() if printed.exists() else "it did not run"


def test_every_layout_equals_one_process(results: Path) -> None:
    check(results, "layouts")


def test_ranks_of_two_nodes_exchange_padded_pieces_and_equal_one_process(results: Path) -> None:
    check(results, "across_nodes")


def test_nobody_waits_in_a_layer(results: Path) -> None:
    check(results, "waits")


def test_rows_in_bf16_and_in_eight_bits_give_what_all_to_all_gives(results: Path) -> None:
    check(results, "bf16")


def test_a_captured_layer_replays_other_tokens(results: Path) -> None:
    check(results, "graph")


def test_what_does_not_fit_takes_all_to_all(results: Path) -> None:
    check(results, "overflow")


def test_a_whole_model_trains_alike_and_nothing_waits_between_forward_and_optimizer(results: Path) -> None:
    check(results, "model")


def test_a_chunk_is_computed_while_another_is_under_way(results: Path) -> None:
    check(results, "chunks")


def test_clones_equal_one_process(clone_results: Path) -> None:
    check(clone_results, "clones")


def test_clones_by_the_kernels_for_bf16_repeat_bit_by_bit_and_nobody_waits(clone_results: Path) -> None:
    check(clone_results, "clones_bf16")


def test_clones_by_the_kernels_for_fp8_are_as_exact_as_without(clone_results: Path) -> None:
    check(clone_results, "clones_fp8")


def test_a_captured_layer_with_clones_replays_other_tokens(clone_results: Path) -> None:
    check(clone_results, "clones_graph")


def test_a_model_with_clones_trains_alike_with_checked_buffers(clone_results: Path) -> None:
    check(clone_results, "clones_model")


def test_rows_of_a_rank_that_came_too_late_are_not_used(results: Path) -> None:
    check(results, "late")


def test_a_rank_that_is_gone_is_named(results: Path) -> None:
    check(results, "missing")
