"""Rows in eight bits: exact where they can be, never silently wrong where they cannot."""

import pytest
import torch

from fsdmoe.kernels.packed_rows import BLOCK, pack_rows, unpack_rows


@pytest.mark.parametrize("width", [1, 127, 128, 300, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_within_half_a_step_and_is_packed_again_without_loss(
    width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x *= torch.logspace(-20, 20, 9, dtype=torch.float32)[:, None].to(dtype)
    packed = pack_rows(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (9, width + -(-width // BLOCK))
    arrived = unpack_rows(packed, width, dtype)
    assert arrived.dtype == dtype
    x, found = x.float(), arrived.float()
    for start in range(0, width, BLOCK):
        part = slice(start, start + BLOCK)
        largest = x[:, part].abs().amax(1, keepdim=True)
        # A scale is less than twice too large; of what is not tiny beside the largest, 4 bits are right.
        error = (found - x)[:, part].abs()
        assert (error <= torch.maximum(x[:, part].abs() / 16, largest * 2.0**-15)).all()
    assert torch.equal(unpack_rows(pack_rows(arrived), width, dtype), arrived)


def test_zeros_stay_zeros_and_no_rows_are_no_rows() -> None:
    assert torch.equal(unpack_rows(pack_rows(torch.zeros(3, 200)), 200, torch.float32), torch.zeros(3, 200))
    assert unpack_rows(pack_rows(torch.zeros(0, 200)), 200, torch.bfloat16).shape == (0, 200)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_arrives_so_and_its_neighbours_are_not_touched(value: float) -> None:
    x = torch.ones(2, 256)
    x[0, 3] = value
    found = unpack_rows(pack_rows(x), 256, torch.float32)
    assert not found[0, :128].isfinite().any()
    assert torch.equal(found[0, 128:], x[0, 128:])
    assert torch.equal(found[1], x[1])
