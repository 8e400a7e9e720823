"""Copies of a checkpoint that are staged from a GPU."""

import pytest
import torch

from fsdmoe.checkpoint.staging import Stager
from fsdmoe.testing import requires_gpu


@requires_gpu
@pytest.mark.parametrize("size", [10, 10_000_000])
def test_copies_from_a_gpu_are_pinned_and_complete(size: int) -> None:
    tensor = torch.randn(size, device="cuda")
    wanted = tensor.cpu()
    copy = Stager().stage({"x": tensor})["x"]
    tensor.zero_()
    assert copy.is_pinned()
    assert torch.equal(copy, wanted)
