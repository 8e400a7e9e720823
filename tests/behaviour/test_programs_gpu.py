"""Random training programs on a GPU, on one rank and on four."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fsdmoe.testing import requires_gpu, requires_nccl
from tests.support.one_gpu import run_ranks_on_one_gpu

ALONE, TOGETHER = 400, 100


def run_piece(world: int, first: int, count: int) -> str:
    given = ["--device", "cuda", "--world", str(world), "--first", str(first), "--count", str(count)]
    return run_ranks_on_one_gpu(world, "-m", "tests.support.random_programs.run", *given)


def run_all(world: int, count: int, piece: int, at_once: int) -> None:
    """In pieces that share the GPU: one by one it would mostly wait for the host."""
    with ThreadPoolExecutor(at_once) as pool:
        for told in pool.map(lambda first: run_piece(world, first, piece), range(0, count, piece)):
            print(told)


@requires_gpu
def test_programs_on_a_gpu_do_so_too() -> None:
    run_all(1, ALONE, piece=50, at_once=8)


@requires_nccl
def test_programs_on_gpu_ranks_do_so_too() -> None:
    run_all(4, TOGETHER, piece=25, at_once=4)
