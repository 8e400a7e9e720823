"""Rows added up by their ids, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.triton.segment_sum import add_rows_by_id_triton

CASES = {
    "a segment of more blocks than are read at a time": (1200, 1),
    "a segment a row": (70, 5000),
    "both": (150, 40),
    "whole blocks": (128, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_added_up_by_their_ids(name: str) -> None:
    num_rows, num_ids = CASES[name]
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(0, num_ids, (num_rows,), generator=generator)
    rows = torch.randn(num_rows, 24, generator=generator)
    out = torch.randn(num_ids + 1, 24, generator=generator)
    expected = out.double().index_put((ids,), rows.double(), accumulate=True)
    add_rows_by_id_triton(out, ids, rows[:, :24])
    assert (out - expected).abs().max() < 1e-4
    assert torch.equal(out[-1].double(), expected[-1]), "a row without ids is not touched"
