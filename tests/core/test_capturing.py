"""Other people's code without the host: the same results."""

from typing import Any
from unittest import mock

import pytest
import torch

from fsdmoe.core.capturing import DeviceOnly


@pytest.mark.parametrize("number", [0.5, 3, True])
@pytest.mark.parametrize("given", [{}, {"dtype": torch.bfloat16}, {"device": "cpu"}])
def test_a_number_becomes_the_same_tensor_without_a_copy(number: Any, given: dict[str, Any]) -> None:
    plain = torch.tensor(number, **given)
    with DeviceOnly(), mock.patch("torch.full", wraps=torch.full) as full:
        found = torch.tensor(number, **given)
    assert full.call_count == 1
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_numbers_below_a_bound_are_counted_alike_without_asking_for_the_largest() -> None:
    numbers = torch.tensor([4, 1, 1, 0, 4, 4])
    plain = torch.bincount(numbers, minlength=6)
    with DeviceOnly():
        found = torch.bincount(numbers, minlength=6)
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.bincount(numbers, minlength=4)
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_other_calls_stay_what_they_are() -> None:
    with DeviceOnly():
        assert torch.tensor([1, 2]).tolist() == [1, 2]
        weights = torch.tensor([0.5, 0.5])
        assert torch.bincount(torch.tensor([0, 0]), weights=weights, minlength=2).tolist() == [1.0, 0.0]
