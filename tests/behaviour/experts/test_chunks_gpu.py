"""Rows that travel in chunks between NCCL ranks: the numbers of one process, and kernels beside exchanges."""

from __future__ import annotations

from fsdmoe.testing import requires_nccl
from tests.support.one_gpu import run_ranks_on_one_gpu


@requires_nccl
def test_four_nccl_ranks_compute_one_chunk_while_another_is_under_way() -> None:
    print(run_ranks_on_one_gpu(4, "-m", "tests.support.chunks_nccl_ranks"))
