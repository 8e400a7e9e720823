"""The other combinations of ``interpreted_codes_cases.py``."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.precision.formats import FP8_BLOCKWISE
from tests.support.triton.interpreted_codes_cases import check_layer, check_ranges, check_update

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    ("dtype", "transposed", "power_of_two"), [(torch.float32, True, False), (torch.bfloat16, False, True)]
)
def test_an_update_writes_the_codes_of_the_weights_that_it_writes(
    dtype: torch.dtype, transposed: bool, power_of_two: bool
) -> None:
    check_update(dtype, transposed=transposed, power_of_two=power_of_two)


def test_layers_compute_with_the_codes_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    check_layer(FP8_BLOCKWISE, "float32", monkeypatch)


def test_ranges_of_a_weight_have_the_codes_and_scales_of_the_whole() -> None:
    check_ranges((None, None))
