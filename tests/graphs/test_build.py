"""Whoever asks for graphs of a model that is sharded already meets the words of the table."""

from typing import Any

import pytest

from fsdmoe.config.train import TrainConfig
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.graphs.build import refuse_model
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model, preset_config
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.lora_case import adapted


def _told(graphs: Any, is_wrapped: bool, dtype: Any, ep: int, dispatcher: Any) -> str:
    bare = tiny_hf("qwen3_moe") if is_wrapped else build_model(preset_config("tiny-qwen3"))
    policy = ParallelPolicy(
        precision=PrecisionConfig(param_dtype=dtype), experts=ExpertsConfig(dispatcher=dispatcher)
    )
    model = parallelize(bare, build_meshes(ep=ep), policy)
    try:
        refuse_model(model, TrainConfig(graphs=graphs))
    except ConfigError as error:
        return str(error)
    return ""


@requires_transformers
@pytest.mark.parametrize(
    ("graphs", "is_wrapped", "dtype", "ep", "dispatcher", "told"),
    [
        ("step", False, "bfloat16", 1, "auto", ""),
        ("step", True, "bfloat16", 1, "auto", ""),
        ("step", False, "float16", 1, "auto", 'got precision.param_dtype = "float16"'),
        ("layer", True, "bfloat16", 1, "auto", 'got model.hf = "Qwen3MoeForCausalLM"'),
        ("step", False, "bfloat16", 2, "all_to_all", "got mesh.ep = 2"),
        ("step", False, "bfloat16", 2, "flex", ""),
    ],
)
def test_a_sharded_model_that_graphs_do_not_go_with_is_refused(
    graphs: str, is_wrapped: bool, dtype: str, ep: int, dispatcher: str, told: str
) -> None:
    found = run_ranks(_told, ep, graphs, is_wrapped, dtype, ep, dispatcher)[0]
    assert bool(found) == bool(told), found
    assert told in found


def _on_codes(graphs: Any) -> str:
    precision = PrecisionConfig(param_dtype="bfloat16", frozen_dtype="float8")
    model = parallelize(adapted("qwen3_moe"), build_meshes(), ParallelPolicy(precision=precision))
    try:
        refuse_model(model, TrainConfig(graphs=graphs))
    except ConfigError as error:
        return str(error)
    return ""


@requires_peft
def test_adapters_on_a_base_in_codes_go_with_graphs_of_steps_alone() -> None:
    assert run_ranks(_on_codes, 1, "step") == [""]
    assert "weights are codes is not captured layer by layer" in run_ranks(_on_codes, 1, "layer")[0]
