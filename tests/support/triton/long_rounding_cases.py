"""Emulated experts of the other recipes, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.support.triton.interpreted_rounding_cases import check_experts

pytestmark = pytest.mark.usefixtures("poisoned", "bf16_as_on_a_gpu")


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "nvfp4"])
def test_experts_are_those_of_plain_torch(name: str) -> None:
    check_experts(name)
