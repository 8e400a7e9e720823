"""Emulated experts of the other recipes and stochastic rounding, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.kernels.triton.round_kernels import Segments, round_operand
from fsdmoe.precision.formats import E2M1, Scaling
from fsdmoe.precision.quantize import rounded
from tests.support.triton.interpreted_rounding_cases import check_experts, draw

pytestmark = pytest.mark.usefixtures("poisoned", "bf16_as_on_a_gpu")


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "nvfp4"])
def test_experts_are_those_of_plain_torch(name: str) -> None:
    check_experts(name)


def test_stochastic_rounding_is_on_average_what_plain_torch_draws() -> None:
    scaling = Scaling(E2M1, (1, 16), "two_level", stochastic=True)
    x = draw(32, 64)
    torch.manual_seed(0)
    ours, others = [], []
    for _ in range(64):
        values, factors = round_operand(x, scaling, Segments(1, 32), transposed=False)
        assert factors is not None
        ours.append(values.float() * factors.view(32, 1))
        others.append(rounded(x, scaling))
    mine, theirs = torch.stack(ours), torch.stack(others)
    noise = theirs.std(0).norm()
    assert (mine.std(0).norm() / noise - 1).abs() < 0.1
    assert (mine.mean(0) - theirs.mean(0)).norm() < 0.25 * noise, "64 draws of each: 0.18 is expected"
