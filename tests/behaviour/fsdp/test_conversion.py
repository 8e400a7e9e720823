"""A sharded model stays on its device and in its dtype, and says so where somebody tries otherwise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, run_sharded, shard_tiny

REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.half(),
    "float64": lambda model: model.double(),
    "meta": lambda model: model.to("meta"),
}


def _refused() -> None:
    model = shard_tiny(Case(model={"num_layers": 2}), build_meshes())
    before = [parameter.data_ptr() for parameter in model.parameters()]
    for got, change in REFUSED.items():
        with pytest.raises(ConfigError, match=rf"to stay float32 on cpu, got .*{got}.*before fsdmoe"):
            change(model)
    assert model.to("cpu") is model.float() is model
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    run_sharded(model, Case(), 0)
    gone = weakref.ref(model)
    gc.collect()
    del model
    gc.collect()
    assert gone() is None


def test_a_sharded_model_is_not_converted_and_what_changes_nothing_is_taken() -> None:
    run_ranks(_refused, 2)
