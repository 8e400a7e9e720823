"""Eight bits an element with a shared exponent: how far off, how far down, and right on average."""

import pytest
import torch

from fsdmoe.precision.block_floats import (
    BLOCK,
    BlockFloats,
    ElementPlace,
    decode,
    encode,
    random_bits,
    round_stochastically,
)

PLACE = ElementPlace(salt=5, start=0, run=1 << 20, stride=0, offset=0)


def coded(values: torch.Tensor, number: int, *, signed: bool) -> torch.Tensor:
    random = random_bits(PLACE, torch.tensor(float(number)), values.numel())[not signed]
    return decode(encode(values, random, signed=signed), signed=signed)


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_is_off_by_an_eighth_at_most_and_not_at_all_on_average(signed: bool) -> None:
    values = (1 + torch.rand(1000)) * torch.logspace(-2, 2, BLOCK).repeat(16)[:1000]
    values = torch.where(torch.rand(1000) < 0.5, values, -values)
    values = values if signed else values.square()
    draws = torch.stack([coded(values, number, signed=signed) for number in range(300)])
    assert ((draws / values - 1).abs() <= 0.1251).all()
    assert ((draws.mean(0) / values - 1).abs() < 0.02).all()
    assert (draws[0] != draws[1]).any(), "every step draws anew"


def test_a_small_second_moment_is_never_lost_beside_a_large_one() -> None:
    values = torch.full((BLOCK,), 1e-20)
    values[3], values[7] = 1.0, 0.0
    got = coded(values, 0, signed=False)
    assert got[3] == pytest.approx(1.0, rel=0.126)
    assert got[7] == 0, "what was never touched"
    assert (got[values == 1e-20] > 0).all()
    assert (got[values == 1e-20] < 1e-8).all()


def test_a_first_moment_far_below_the_largest_becomes_zero_and_keeps_no_sign() -> None:
    values = torch.tensor([1.0, -0.5, 1e-9, -1e-9, 0.0])
    got = coded(values, 0, signed=True)
    assert got[:2].tolist() == [1.0, -0.5]
    assert not got[2:].any()


def test_zeros_and_the_largest_and_smallest_numbers_survive() -> None:
    for value in (0.0, 3e38, 1e-38):
        got = coded(torch.full((BLOCK + 1,), value), 0, signed=False)
        torch.testing.assert_close(got, torch.full((BLOCK + 1,), value), rtol=0.126, atol=0)


def test_chances_follow_the_place_in_the_whole_tensor() -> None:
    step = torch.tensor(7.0)
    whole = random_bits(ElementPlace(9, 0, 4096, 0, 0), step, 4096)
    rows = whole[0].view(8, 4, 128)
    mine = random_bits(
        ElementPlace(9, 256, 128, 512, 384), step, 512
    )  # rows 2 to 5 of the last quarter of columns
    assert torch.equal(mine[0].view(4, 128), rows[2:6, 3])
    assert not torch.equal(random_bits(ElementPlace(8, 0, 4096, 0, 0), step, 4096)[0], whole[0])
    means = [bits.float().mean().item() / 0xFFFF for bits in whole]
    assert means == pytest.approx([0.5] * len(whole), abs=0.02)


def test_a_part_of_a_run_begins_at_a_block() -> None:
    codes = torch.arange(200, dtype=torch.uint8)
    part = BlockFloats(codes, torch.arange(4, dtype=torch.uint8))[128:]
    assert part.codes[0] == 128
    assert part.exponents.tolist() == [2, 3]


def test_rounding_by_chance_keeps_what_is_not_finite() -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    values = bits.view(torch.float32).repeat(3)
    found = round_stochastically(values, torch.tensor([0, 1, 0xFFFF], dtype=torch.int32).repeat_interleave(5))
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
