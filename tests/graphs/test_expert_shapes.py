"""Experts that a loop on the host would compute are refused before anything is captured."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.plan import ParamPlan
from fsdmoe.graphs.expert_shapes import check_expert_shapes
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model, preset_config
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.lora_case import adapted


def _plans(family: str | None, dtype: Any, **changes: Any) -> list[ParamPlan]:
    bare = (
        build_model(preset_config("tiny-qwen3", **changes)) if family is None else tiny_hf(family, **changes)
    )
    return _plans_of(bare, PrecisionConfig(param_dtype=dtype))


def _plans_of(bare: nn.Module, precision: PrecisionConfig) -> list[ParamPlan]:
    model = parallelize(bare, build_meshes(), ParallelPolicy(precision=precision))
    return [param for group in engine_of(model).groups for param in group.plan.params]


def _told(family: str | None, dtype: str, changes: dict[str, Any]) -> str:
    try:
        check_expert_shapes(_plans(family, dtype, **changes), getattr(torch, dtype))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "dtype", "told"),
    [
        ({}, "bfloat16", ""),
        ({"moe_intermediate_size": 12}, "bfloat16", "multiples of it, got 12 in model.layers.0.mlp.experts."),
        ({}, "float32", 'expected precision.param_dtype = "bfloat16", got torch.float32'),
    ],
)
def test_widths_and_dtypes_that_no_grouped_kernel_takes_are_named(
    changes: dict[str, Any], dtype: str, told: str
) -> None:
    (found,) = run_ranks(_told, 1, None, dtype, changes)
    assert bool(found) == bool(told)
    assert told in found


@requires_transformers
def test_so_are_those_of_wrapped_models() -> None:
    (found,) = run_ranks(_told, 1, "qwen3_moe", "bfloat16", {"moe_intermediate_size": 12})
    assert "got 12 in model.layers.0.mlp.experts.down_proj [8, 16, 12]" in found
    (found,) = run_ranks(_told, 1, "qwen3_moe", "bfloat16", {"moe_intermediate_size": 16})
    assert found == ""


def _told_of_codes(dtype: Any) -> str:
    precision = PrecisionConfig(param_dtype=dtype, frozen_dtype="float8")
    try:
        check_expert_shapes(_plans_of(adapted("qwen3_moe"), precision), getattr(torch, dtype))
    except ConfigError as error:
        return str(error)
    return ""


@requires_peft
def test_codes_are_looked_at_as_the_values_that_they_stand_for() -> None:
    assert "multiples of it, got 12 in model.layers.0.mlp." in run_ranks(_told_of_codes, 1, "bfloat16")[0]
    assert "got torch.float32 for model.layers.0.mlp.experts." in run_ranks(_told_of_codes, 1, "float32")[0]
