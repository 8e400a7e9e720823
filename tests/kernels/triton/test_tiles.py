"""Which tile a product gets, by the width of its results."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.triton.tiles import grad_tile, tiles_for


@pytest.mark.parametrize("num_columns", [128, 384, 640, 1152, 1408])
def test_tiles_are_narrow_where_wide_ones_would_waste_columns(num_columns: int) -> None:
    chosen = tiles_for(65536, 64, 1152, 384, spare_sms=4).project_to(num_columns)
    assert (chosen.n, chosen.per_sm, chosen.spare_sms) == (128, 2, 4)
    for dtype in (torch.float32, torch.bfloat16):
        chosen = grad_tile(torch.empty(2, 64, num_columns, dtype=dtype), accumulate=False)
        assert (chosen.n, chosen.per_sm) == (128, 2)


@pytest.mark.parametrize("num_columns", [256, 768, 1536, 2048, 2880])
def test_tiles_are_wide_where_columns_fill_them(num_columns: int) -> None:
    chosen = tiles_for(131072, 16, 2048, 768).project_to(num_columns)
    assert (chosen.n, chosen.per_sm) == (256, 1)
    assert grad_tile(torch.empty(2, 64, num_columns), accumulate=False).n == 256


def test_few_rows_keep_their_low_tiles() -> None:
    tiles = tiles_for(512, 64, 1152, 384)
    assert tiles.project_to(1152) is tiles.project
    assert tiles.project.m == tiles.align == 64
