"""Numbers that become tensors are written by the device they are for."""

from typing import Any
from unittest import mock

import pytest
import torch

from fsdmoe.capturing import ConstantsOnDevice


@pytest.mark.parametrize("number", [0.5, 3, True])
@pytest.mark.parametrize("given", [{}, {"dtype": torch.bfloat16}, {"device": "cpu"}])
def test_a_number_becomes_the_same_tensor_without_a_copy(number: Any, given: dict[str, Any]) -> None:
    plain = torch.tensor(number, **given)
    with ConstantsOnDevice(), mock.patch("torch.full", wraps=torch.full) as full:
        found = torch.tensor(number, **given)
    assert full.call_count == 1
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_lists_stay_what_they_are() -> None:
    with ConstantsOnDevice():
        assert torch.tensor([1, 2]).tolist() == [1, 2]
