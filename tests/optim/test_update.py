"""An update where no fused kernel runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fsdmoe.optim.update import update
from fsdmoe.optim.update_ranges import UpdateRange

SETTINGS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_a_skipped_step_leaves_moments_as_they_are_with_gradients_in_lower_precision() -> None:
    group: Any = SimpleNamespace(grad=SimpleNamespace(main=torch.full((8,), torch.inf, dtype=torch.bfloat16)))
    tensors = [torch.rand(8) for _ in range(3)]
    before = [tensor.clone() for tensor in tensors]
    update_range = UpdateRange(
        *tensors, step=torch.ones(()), group=group, indices=[0], held=slice(0, 8), cast=None, codes=None,
        place=None, stochastic=False, on_host=False,
    )  # fmt: skip
    update(SETTINGS, [update_range], torch.ones(()))
    for name, kept, now in zip(("weights", "exp_avg", "exp_avg_sq"), before, tensors, strict=True):
        assert torch.equal(now, kept), f"{name}: {now.tolist()}"
