"""Weight gradients that fetch their rows build for Hopper, however they are stored; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.gluon import weight_grad_fetched
from fsdmoe.kernels.triton.row_map import RowMap
from tests.support.triton.compile_launches import compiling

SHARED_LIMIT = 232448  # of a block


@pytest.mark.full
@pytest.mark.parametrize("fetch_left", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_it_builds(fetch_left: bool, dtype: torch.dtype, accumulate: bool) -> None:
    def indices(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    row_map = RowMap(indices(64, 2), indices(256), indices(4), indices(2), indices(2))
    rows, sorted_rows = torch.zeros(64, 256).bfloat16(), torch.zeros(256, 256).bfloat16()
    operands = (rows, sorted_rows) if fetch_left else (sorted_rows, rows)
    with compiling(90) as compiled:
        out = torch.zeros(2, 256, 256, dtype=dtype)
        weight_grad_fetched(*operands, row_map, out, fetch_left=fetch_left, accumulate=accumulate)
    (kernel,) = compiled.values()
    assert kernel.metadata.shared <= SHARED_LIMIT
    for instruction in (
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
        "cp.async.bulk.tensor",
        "cp.async.cg.shared.global",
    ):
        assert instruction in kernel.asm["ptx"]
