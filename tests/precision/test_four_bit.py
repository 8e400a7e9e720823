"""Codes in four bits are torchao's, bit for bit, and their values are near the weights."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.precision.four_bit import FourBit, FourBitName, decode, encode


def coded(values: torch.Tensor, form: FourBit) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(values.numel() // 2, dtype=torch.uint8)
    factors = torch.empty(form.factor_numel(values.numel()), dtype=torch.bfloat16)
    encode(values.flatten(), form, codes, factors)
    return codes, factors


def weights(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return (0.02 * torch.randn(rows, columns, generator=random)).to(dtype)


def test_nf4_has_the_codes_of_torchao() -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, get_block_absmax

    values = weights(96, 4096)
    codes, factors = coded(values, FourBit("nf4", 64))
    theirs = NF4Tensor.from_tensor(values, 64, 256)
    assert torch.equal(codes, theirs.quantized_data)
    assert torch.equal(factors, get_block_absmax(values.flatten(), 64))
    found = decode(codes, factors, FourBit("nf4", 64), torch.empty(values.numel()))
    expected = theirs.get_original_weight().float().flatten()
    # Theirs has the scales in eight bits, around their mean.
    assert (found - expected).abs().max() < 0.01 * values.abs().max()


def test_int4_has_the_codes_of_torchao() -> None:
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _quantize_affine_tinygemm,
    )

    values = weights(48, 1024)
    codes, factors = coded(values, FourBit("int4", 128))
    scale, zero = _choose_qparams_affine_tinygemm(
        values.float(), MappingType.ASYMMETRIC, (1, 128), torch.int32, 0, 15
    )
    theirs = _quantize_affine_tinygemm(values.float(), (1, 128), scale, zero, torch.int32, 0, 15)
    signed = theirs.view(-1, 2).to(torch.uint8) ^ 8  # as Int4Tensor packs them: two's complement, low first
    assert torch.equal(codes, signed[:, 1] << 4 | signed[:, 0])
    assert torch.equal(factors.view(-1, 2), torch.stack([scale, zero], -1).view(-1, 2).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "block", "error"), [("nf4", 64, 0.11), ("int4", 128, 0.13), ("int4", 32, 0.1)]
)
def test_values_are_near_the_weights_and_come_back_to_their_codes(
    name: FourBitName, block: int, error: float, dtype: torch.dtype
) -> None:
    form = FourBit(name, block)
    values = weights(8, 512, dtype)
    codes, factors = coded(values, form)
    found = decode(codes, factors, form, torch.empty(values.numel(), dtype=dtype))
    difference = (found.float() - values.float().flatten()).norm() / values.float().norm()
    assert difference < error
    assert torch.equal(coded(found, form)[0], codes)


@pytest.mark.parametrize("name", ["nf4", "int4"])
def test_a_block_of_zeros_stays_zero(name: FourBitName) -> None:
    form = FourBit(name, 64)
    codes, factors = coded(torch.zeros(128), form)
    assert decode(codes, factors, form, torch.empty(128)).abs().max() < 1e-6


def test_four_bits_and_their_factors_take_half_a_byte_and_a_little() -> None:
    assert FourBit("nf4", 64).bytes_of(6400) == FourBit("int4", 128).bytes_of(6400) == 0.53125 * 6400
