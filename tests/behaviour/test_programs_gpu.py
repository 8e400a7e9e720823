"""Random training programs on a GPU, on one rank and on four."""

from fsdmoe.testing import requires_gpu, requires_nccl
from tests.support.one_gpu import run_ranks_on_one_gpu


@requires_gpu
def test_programs_on_a_gpu_do_so_too() -> None:
    given = ["--device", "cuda", "--world", "1", "--count", "100"]
    print(run_ranks_on_one_gpu(1, "-m", "tests.support.random_programs.run", *given))


@requires_nccl
def test_programs_on_gpu_ranks_do_so_too() -> None:
    given = ["--device", "cuda", "--world", "4", "--count", "25"]
    print(run_ranks_on_one_gpu(4, "-m", "tests.support.random_programs.run", *given))
