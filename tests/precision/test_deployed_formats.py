"""The rounding of deployed formats: how far values move, and what it must not depend on."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.precision.deployed_formats import BLOCKS, WeightRounding, round_weight_
from fsdmoe.precision.formats import DeployedFormat

FORMATS = list(BLOCKS)


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def rounded(values: torch.Tensor, kind: DeployedFormat, *, transposed: bool = False) -> torch.Tensor:
    found = values.clone()
    round_weight_(found, WeightRounding(kind, values.dtype, transposed))
    return found


@pytest.mark.parametrize(
    ("kind", "error"), [("int4", 0.10), ("mxfp4", 0.125), ("nvfp4", 0.10), ("fp8", 0.03)]
)
def test_values_move_by_no_more_than_the_format_explains(kind: DeployedFormat, error: float) -> None:
    before = weights(4, 64, 96)
    assert (rounded(before, kind) - before).norm() / before.norm() < error


@pytest.mark.parametrize("kind", FORMATS)
def test_a_stack_is_rounded_as_its_matrices_are_lying_either_way(kind: DeployedFormat) -> None:
    stack = weights(3, 32, 64, dtype=torch.bfloat16)
    expected = torch.stack([rounded(matrix, kind) for matrix in stack])
    assert torch.equal(rounded(stack, kind), expected)
    assert torch.equal(rounded(stack.mT.contiguous(), kind, transposed=True).mT, expected)


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8"])
def test_rows_do_not_depend_on_each_other(kind: DeployedFormat) -> None:
    matrix = weights(32, 64)
    assert torch.equal(rounded(matrix, kind)[:5], rounded(matrix[:5], kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_rounded_stays_as_it_is(kind: DeployedFormat, dtype: torch.dtype) -> None:
    once = rounded(weights(256, 256, dtype=dtype), kind)
    torch.testing.assert_close(rounded(once, kind), once, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(kind: DeployedFormat) -> None:
    values = torch.zeros(2, 64)
    assert torch.equal(rounded(values, kind), values)
    values[0, 3] = torch.inf
    assert not rounded(values, kind).isfinite().all()
