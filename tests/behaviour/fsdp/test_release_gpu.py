"""Device memory that is lent between steps: all of it, and every value comes back."""

from fsdmoe.testing import requires_gpu, requires_nccl
from tests.support.one_gpu import run_ranks_on_one_gpu

PROGRAM = ("-m", "tests.support.lent_memory")


@requires_gpu
def test_one_gpu_lends_all_but_a_little_and_trains_on() -> None:
    print(run_ranks_on_one_gpu(1, *PROGRAM))


@requires_nccl
def test_four_ranks_lend_memory_that_nccl_does_not_know() -> None:
    assert "not registered" in run_ranks_on_one_gpu(4, *PROGRAM, "--unregistered")
