"""Rounding and scales against what the formats themselves say, element by element and block by block."""

import math

import pytest
import torch

from fsdmoe.precision.formats import E2M1, E4M3, E5M2, Element, Product, Scaling
from fsdmoe.precision.quantize import (
    block_amax,
    dequantize,
    hadamard,
    quantize,
    round_to,
    rounded,
    rounded_product,
)

E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_rounding_finds_the_nearest_code_ties_to_even(element: Element) -> None:
    assert element.dtype is not None
    codes = torch.arange(256, dtype=torch.uint8).view(element.dtype).double()
    magnitudes = codes[:128][codes[:128].isfinite()]  # in order, so that every other one is even
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    even = magnitudes[(torch.arange(len(between)) + 1) // 2 * 2]
    assert torch.equal(round_to(between.float(), element).double(), even)
    for sign in (1, -1):
        above, below = between * (1 + 2**-20), between * (1 - 2**-20)
        assert torch.equal(round_to((sign * above).float(), element).double(), sign * magnitudes[1:])
        assert torch.equal(round_to((sign * below).float(), element).double(), sign * magnitudes[:-1])
        assert torch.equal(round_to((sign * magnitudes).float(), element).double(), sign * magnitudes)
    beyond = torch.tensor([1e9, -torch.inf, element.largest * 1.2])
    assert torch.equal(round_to(beyond, element), element.largest * torch.tensor([1.0, -1.0, 1.0]))
    assert round_to(torch.tensor([torch.nan]), element).isnan()


@pytest.mark.parametrize("scaling", [
    Scaling(E4M3, (1, 32), "power_of_two"), Scaling(E4M3, (128, None)), Scaling(E2M1, (16, 16), "two_level"),
    Scaling(E2M1, (1, 16), "two_level", hadamard=16), Scaling(E5M2, (None, None)),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 40), (32, 64)])
def test_several_operands_are_quantised_each_by_itself(scaling: Scaling, shape: tuple[int, int]) -> None:
    torch.manual_seed(4)
    several = torch.randn(3, *shape) * torch.tensor([1.0, 1e-3, 1e3])[:, None, None]
    product = Product(scaling, scaling)
    for x in (several, several.mT):
        found = rounded_product(x, x.flip(-2), product)
        assert torch.equal(rounded(x, scaling), torch.stack([rounded(each, scaling) for each in x]))
        for each, one in zip(x, found, strict=True):
            assert torch.allclose(one, rounded_product(each, each.flip(-2), product), rtol=1e-5)


def test_four_bits_round_to_the_nearest_of_eight_magnitudes_ties_to_even() -> None:
    grid = torch.tensor(E2M1_GRID)
    x = torch.linspace(0, 7, 1401)
    distance = (x[:, None] - grid).abs()
    nearest, found = distance.min(1).values, round_to(x, E2M1)
    assert torch.allclose((x - found).abs(), nearest)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    assert round_to(ties, E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4, -2]


def test_rounding_by_chance_is_right_on_average_and_moves_to_neighbours_alone() -> None:
    torch.manual_seed(0)
    x = torch.full((40_000,), 2.3)
    found = round_to(x, E2M1, stochastic=True)
    assert set(found.tolist()) == {2.0, 3.0}
    assert found.mean().item() == pytest.approx(2.3, abs=0.02)


@pytest.mark.parametrize("block", [(1, 4), (4, 1), (2, 3), (1, None), (None, 1), (None, None), (8, 8)])
@pytest.mark.parametrize("shape", [(6, 12), (5, 7), (1, 1)])
def test_every_block_has_the_scale_of_its_own_largest(
    block: tuple[int | None, int | None], shape: tuple[int, int]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    scaling = Scaling(E4M3, block)
    rows, columns = (size or extent for size, extent in zip(block, shape, strict=True))
    expected = torch.empty(shape)
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            here = slice(top, top + rows), slice(left, left + columns)
            scale = x[here].abs().max() / 448
            expected[here] = (x[here] / scale).to(torch.float8_e4m3fn).float() * scale
    codes, scales = quantize(x, scaling)
    assert scales.shape == (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))
    assert torch.equal(dequantize((codes, scales), scaling), expected)  # type: ignore[arg-type]
    assert codes.abs().max() == 448


def test_scales_of_powers_of_two_never_clip_and_are_less_than_twice_too_large() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)) * 3
    codes, scales = quantize(x, Scaling(E4M3, (1, 32), "power_of_two"))
    assert torch.equal(torch.exp2(scales.log2().round()), scales)
    largest = codes.abs().amax(1)
    assert largest.max() <= 448
    assert largest.min() > 448 / 2 * (1 - 2**-4)
    exact = Scaling(E4M3, (1, 1), "power_of_two")
    assert torch.equal(rounded(torch.tensor([[448.0, 3.5, 0.0]]), exact), torch.tensor([[448.0, 3.5, 0.0]]))


def test_two_level_scales_are_eight_bits_on_top_of_one_for_all() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 0, 8)[:, None]
    scaling = Scaling(E2M1, (1, 16), "two_level")
    codes, scales = quantize(x, scaling)
    whole = x.abs().max() / 6 / 448
    in_eight_bits = scales / whole
    assert torch.allclose(in_eight_bits, round_to(in_eight_bits, E4M3), rtol=1e-6)
    assert set(codes.abs().unique().tolist()) <= set(E2M1_GRID)
    assert (rounded(x, scaling) - x).norm() / x.norm() < 0.15


def test_zeros_and_empty_operands_stay_what_they_are() -> None:
    for scale in ("float32", "power_of_two", "two_level"):
        scaling = Scaling(E4M3, (1, 128), scale)  # type: ignore[arg-type]
        assert torch.equal(rounded(torch.zeros(3, 5), scaling), torch.zeros(3, 5))
        for shape in ((0, 5), (3, 0)):
            assert rounded(torch.zeros(shape), scaling).shape == shape
            assert block_amax(torch.zeros(shape), (None, None)).numel() == 0
    product = rounded_product(torch.zeros(2, 0), torch.zeros(3, 0), Product(*[Scaling(E4M3, (1, None))] * 2))
    assert torch.equal(product, torch.zeros(2, 3))


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_scales_that_are_given_clip_what_is_large_and_not_what_is_infinite(element: Element) -> None:
    """Skipped steps depend on it: a gradient that overflowed must not look like a large one."""
    x = torch.tensor([[1e9, -torch.inf, torch.inf, torch.nan, -2.0]])
    scaling = Scaling(element, (None, None))
    found = dequantize(quantize(x, scaling, torch.full((1, 1), 2.0)), scaling)
    assert found.isnan().tolist() == [[False, True, True, True, False]]
    assert found[0, [0, 4]].tolist() == [2 * element.largest, -2.0]


def test_a_rotation_leaves_products_as_they_are() -> None:
    matrix = hadamard(16)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(16), atol=1e-6)
    assert torch.equal(matrix, hadamard(16)), "the same on every rank and in every step"
    fine = Element("fine", 1e30, 20, -100)
    first, second = torch.randn(5, 37), torch.randn(7, 37)  # 37: the last sixteen are not full
    rotated = Scaling(fine, (1, None), hadamard=16)
    assert torch.allclose(
        rounded_product(first, second, Product(rotated, rotated)), first @ second.t(), atol=1e-4
    )
