"""On a GPU: with an exploding rate logits stay at the threshold, where plain Muon's grow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fsdmoe.testing import requires_gpu
from tests.optim.test_qk_clip import explode

pytestmark = requires_gpu


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Meshes of this process alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_logits_stay_at_the_threshold_where_plain_muon_lets_them_grow() -> None:
    free, held = explode(1e30, dtype="bfloat16"), explode(30.0, dtype="bfloat16")
    assert max(free[1]) > 3 * 30
    assert max(held[1]) < 1.3 * 30
    assert all(map(math.isfinite, held[0]))
