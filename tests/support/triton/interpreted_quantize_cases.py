"""Both ways round in one pass, in Triton's interpreter: equal to the plain-torch definition."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.fp8_operands import Operand, Wanted, quantize_both_reference
from fsdmoe.kernels.triton.quantize_kernels import (
    quantize_both_triton,
    quantize_side_by_side_triton,
    transpose_codes_triton,
)
from fsdmoe.precision.formats import E4M3, E5M2, Scaling

pytestmark = pytest.mark.usefixtures("poisoned", "fp8_as_on_a_gpu")
# As rows, transposed; columns of the matrix.
CASES = {
    "gradients of blockwise": (Scaling(E4M3, (1, 128)), Scaling(E4M3, (1, 128)), 256),
    "weights of blockwise": (Scaling(E4M3, (128, 128)), Scaling(E4M3, (128, 128)), 128),
    "rowwise": (Scaling(E4M3, (1, None)), Scaling(E5M2, (1, None)), 144),
    "tensorwise": (Scaling(E5M2, (None, None)), Scaling(E4M3, (None, None)), 48),
    "inputs of blockwise": (
        Scaling(E4M3, (1, 128), "power_of_two"),
        Scaling(E4M3, (128, None), "power_of_two"),
        256,
    ),
    "one way": (None, Scaling(E4M3, (None, None), "power_of_two"), 128),
}


def draw(num_rows: int, num_columns: int) -> torch.Tensor:
    """Magnitudes differ by row and by column; a row and a column are zero."""
    generator = torch.Generator().manual_seed(num_columns)
    x = torch.randn(num_rows, num_columns, generator=generator).mul(torch.linspace(0.1, 9, num_columns))
    x *= torch.randn(num_rows, 1, generator=generator).exp()
    x[3], x[:, 5] = 0, 0
    return x


def check(found: Operand | None, expected: Operand | None) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.kind == expected.kind
    assert found.codes_RC.dtype == expected.codes_RC.dtype
    seen = expected.scales > 0
    assert torch.equal(found.scales[seen], expected.scales[seen])
    assert (found.scales[~seen] <= 2.0**-100).all()
    codes, exact = found.codes_RC.float(), expected.codes_RC.float()
    assert (codes != exact).sum() <= 1e-3 * codes.numel()
    torch.testing.assert_close(codes, exact, rtol=0.26, atol=2.0**-8)


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_is_quantised_both_ways_as_defined(name: str) -> None:
    rows, transposed, num_columns = CASES[name]
    x = draw(130, num_columns)
    for padded in (256,) if name == "inputs of blockwise" else (256, 144):
        x_in = x if padded == 256 else draw(144, num_columns)
        wanted = (rows and Wanted(rows), transposed and Wanted(transposed))
        found = quantize_both_triton(x_in, *wanted, padded)
        expected = quantize_both_reference(x_in, *wanted, padded)
        check(found.rows, expected.rows)
        check(found.transposed, expected.transposed)


def test_matrices_side_by_side_have_the_codes_of_one() -> None:
    whole, scaling = draw(130, 384), Scaling(E4M3, (1, 128))
    parts = [whole[:, :256], whole[:, 256:].contiguous()]
    found = quantize_side_by_side_triton(parts, Wanted(scaling), Wanted(scaling), 256)
    expected = quantize_both_triton(whole, Wanted(scaling), Wanted(scaling), 256)
    for one, other in ((found.rows, expected.rows), (found.transposed, expected.transposed)):
        assert one is not None
        assert other is not None
        assert torch.equal(one.codes_RC.view(torch.uint8), other.codes_RC.view(torch.uint8))
        assert torch.equal(one.scales, other.scales)


def test_scales_that_are_given_clip_and_what_is_not_finite_stays_so() -> None:
    x = draw(130, 128)
    x[7, 9], x[8, 9] = torch.inf, torch.nan
    scaling, scales = Scaling(E4M3, (None, None)), torch.full((1, 1), 1e-3)
    wanted = Wanted(scaling, scales), Wanted(scaling, scales)
    found, transposed = quantize_both_triton(x, *wanted, 256)
    assert found is not None
    assert transposed is not None
    values = found.values()
    assert values[7:9, 9].isnan().all()
    assert values.isnan().sum() == 2
    values = values.nan_to_num(0.0)
    assert values.abs().max() == pytest.approx(0.448)
    assert torch.equal(values.t(), transposed.values().nan_to_num(0.0))
    assert not values[130:].any()


def test_codes_are_transposed_as_they_are() -> None:
    codes = draw(144, 272).to(torch.float8_e4m3fn)
    assert torch.equal(transpose_codes_triton(codes).view(torch.uint8), codes.view(torch.uint8).t())
