"""The kernels that put rows in sending order and pack them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.packed_rows import pack_rows, unpack_rows
from fsdmoe.kernels.send_order import index_rows, order_rows
from fsdmoe.kernels.triton import send_order_kernel
from tests.support.send_order_case import draw

pytestmark = pytest.mark.usefixtures("poisoned", "fp8_as_on_a_gpu")


@pytest.mark.parametrize(("num_ranks", "per_rank", "num_ids"), [(2, 4, 3), (8, 1, 2)])
def test_the_order_of_rows_is_that_of_plain_torch(
    num_ranks: int, per_rank: int, num_ids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_order_kernel, "_LANES", 16)
    _, weights_TK, ids_TK = draw(13, num_ranks * per_rank, num_ids)
    index_TP, _, counts_C = index_rows(ids_TK, num_ranks, per_rank)
    wanted = order_rows(weights_TK, ids_TK, index_TP, counts_C, per_rank)
    with kernels("triton"):
        found = order_rows(weights_TK, ids_TK, index_TP, counts_C, per_rank)
    num_rows = int(counts_C[:num_ranks].sum())
    assert torch.equal(found.permutation.slots_RK, wanted.permutation.slots_RK)
    assert torch.equal(
        found.first(num_rows).permutation.sources_M, wanted.first(num_rows).permutation.sources_M
    )
    assert torch.equal(found.labels_ML[:num_rows], wanted.labels_ML[:num_rows])
    assert len(found.labels_ML) == len(wanted.labels_ML) == 13 * min(num_ids, num_ranks)


@pytest.mark.parametrize(("width", "dtype"), [(1200, torch.bfloat16), (96, torch.float32)])
def test_rows_are_packed_as_in_plain_torch(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    x = (x * torch.logspace(-20, 20, 5)[:, None]).to(dtype)
    x[1, 3], x[2, 4], x[3] = torch.inf, torch.nan, 0.0
    packed = pack_rows(x)
    arrived = unpack_rows(packed, width, dtype)
    with kernels("triton"):
        found = pack_rows(x)
        assert torch.equal(unpack_rows(packed, width, dtype).nan_to_num(7.0), arrived.nan_to_num(7.0))
    # Codes of what is not finite are of no account, and so is the scale of zeros.
    assert torch.equal(unpack_rows(found, width, dtype).nan_to_num(7.0), arrived.nan_to_num(7.0))
    assert torch.equal(found[[0, 4]], packed[[0, 4]])
