"""Values of codes in four bits: the kernel's are those of plain torch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.frozen_weights import frozen_values
from fsdmoe.precision.four_bit import FourBit, encode
from fsdmoe.precision.quantized_weight import WeightScales, decoded

pytestmark = pytest.mark.usefixtures("poisoned", "bf16_as_on_a_gpu")


@pytest.mark.parametrize("form", [FourBit("nf4", 64), FourBit("int4", 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoded_values_are_those_of_plain_torch(form: FourBit, dtype: torch.dtype) -> None:
    values = torch.randn(3, 12, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes = torch.empty(3, 12, 128, dtype=torch.uint8)
    factors = torch.empty(form.factor_numel(values.numel()), dtype=torch.bfloat16)
    encode(values.flatten(), form, codes.view(-1), factors)
    scales = WeightScales(factors, (1, form.block), four_bit=form, table=form.table_on(codes.device))
    with kernels("triton"):
        found = frozen_values(codes, scales, dtype)
    assert found.shape == values.shape
    assert torch.equal(found, decoded(codes, scales, dtype))
