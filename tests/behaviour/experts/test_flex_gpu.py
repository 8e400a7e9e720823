"""``flex`` through its kernels: four processes on one GPU that write into each other's memory.

One GPU gives each process its share of time, so a barrier of four takes milliseconds here: right for
numbers, waits and failures, meaningless for speed.
"""

from __future__ import annotations

from fsdmoe.testing import requires_nccl
from tests.support.one_gpu import run_ranks_on_one_gpu

pytestmark = requires_nccl


def run(*checks: str) -> None:
    print(run_ranks_on_one_gpu(4, "-m", "tests.support.flex_gpu_ranks", *checks))


def test_every_layout_equals_one_process() -> None:
    run("layouts")


def test_ranks_of_two_nodes_exchange_padded_pieces_and_equal_one_process() -> None:
    run("across_nodes")


def test_rows_in_bf16_and_in_eight_bits_give_what_all_to_all_gives_and_nobody_waits() -> None:
    run("bf16", "waits")


def test_a_whole_model_trains_alike_and_nothing_waits_between_forward_and_optimizer() -> None:
    run("model")


def test_a_captured_layer_replays_other_tokens() -> None:
    run("graph")


def test_what_does_not_fit_takes_all_to_all() -> None:
    run("overflow")


def test_a_rank_that_is_gone_is_named() -> None:
    run("missing")
