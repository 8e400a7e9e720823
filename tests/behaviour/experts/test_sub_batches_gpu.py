"""Rows in sub-batches between NCCL ranks: the losses of whole ones, with buffers that turn to NaN when they
are let go, so that weights which are still read cannot be another layer's without notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdmoe.testing import requires_nccl
from tests.behaviour.test_nccl_gpu import losses


@requires_nccl
def test_four_nccl_ranks_in_sub_batches_have_the_losses_of_whole_ones(tmp_path: Path) -> None:
    shared: dict[str, object] = {
        "precision__param_dtype": "float32", "mesh__ep": 4, "train__micro_batch_size": 2,
        "train__global_batch_size": 16, "train__steps": 6, "model__n_shared_experts": 1, "fsdp__debug": True,
        "experts__dispatcher": "all_to_all",
    }  # fmt: skip
    one, two = (losses(tmp_path / f"{n}", 4, **shared, experts__sub_batches=n) for n in (1, 2))
    worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
    print(f"two sub-batches: worst relative difference to none over {len(one)} steps {worst:.1e}")
    assert one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-4)
