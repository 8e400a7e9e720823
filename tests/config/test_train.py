"""What graphs do not go with is refused before anything is built, by its key, with the fix."""

from dataclasses import replace
from typing import Any

import pytest

from fsdmoe.config import TrainConfig, load_config
from fsdmoe.config.compatibility import refuse_incompatible
from fsdmoe.core.errors import ConfigError
from tests.support.config_building import build

GRAPHS: dict[str, Any] = {"train": {"graphs": "step"}}
QUANTIZED: dict[str, Any] = {"recipe": "fp8_blockwise", "quantized_weights": True}
REFUSED: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "mesh.ep": ({"mesh": {"ep": 2}}, 2),
    "mesh.etp": ({"mesh": {"etp": 2}}, 2),
    "mesh.cp": ({"mesh": {"cp": 2}}, 2),
    "context_parallel.dynamic": ({"context_parallel": {"dynamic": True}}, 2),
    "memory.offload": ({"memory": {"offload": ["qkv"]}}, 1),
    "optim.state_offload": ({"optim": {"state_offload": 0.5}}, 1),
    "fsdp.cpu_offload": ({"fsdp": {"cpu_offload": True}}, 1),
    "fsdp.lean": ({"fsdp": {"lean": True}}, 1),
    "fsdp.debug": ({"fsdp": {"debug": True}}, 1),
    "train.kernels": ({"train": {"kernels": "torch"}}, 1),
    "experts.record": ({"experts": {"record": "somewhere"}}, 1),
    "experts.compute": ({"experts": {"compute": "sequential"}}, 1),
    "experts.capacity.scope": ({"mesh": {"tp": 2}, "experts": {"capacity": {"scope": "sequence"}}}, 2),
    "precision.param_dtype": ({"precision": {"param_dtype": "float16"}}, 1),
    "precision.reduce_dtype": ({"precision": {"reduce_dtype": "float16"}}, 1),
    "precision.recipe": ({"precision": {"recipe": "fp8_rowwise"}}, 1),
    "precision.statistics": ({"precision": QUANTIZED | {"statistics": 5}}, 1),
    "precision.emulate": ({"precision": QUANTIZED | {"emulate": True}}, 1),
}


REFUSED_BY_LAYER: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    key: REFUSED[key]
    for key in (
        "mesh.cp",
        "memory.offload",
        "fsdp.lean",
        "precision.recipe",
        "precision.param_dtype",
    )
} | {
    "precision.frozen_dtype": ({"precision": {"frozen_dtype": "float8"}}, 1),
    "mesh.tp": ({"mesh": {"tp": 2}}, 2),
    "memory.recompute": ({"memory": {"recompute": ["norms", "experts"]}}, 1),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_a_graph_cannot_replay_is_refused_by_its_key(key: str) -> None:
    check_refused("step", key, *REFUSED[key])


@pytest.mark.parametrize("key", REFUSED_BY_LAYER)
def test_what_attention_in_graphs_does_not_go_with_is_refused_by_its_key(key: str) -> None:
    check_refused("layer", key, *REFUSED_BY_LAYER[key])


def check_refused(graphs: str, key: str, changed: dict[str, dict[str, Any]], world: int) -> None:
    with_graphs = {**changed, "train": changed.get("train", {}) | {"graphs": graphs}}
    _, plain = build(changed, world)
    config, problems = build(with_graphs, world)
    assert config is None
    (found,) = [line for line in problems if line not in plain]
    assert found.startswith("train.graphs: ")
    assert f"got {key} = " in found
    assert f"set {key} = " in found


def test_a_usual_run_may_be_captured() -> None:
    for world in (1, 4):
        config, problems = build(GRAPHS | {"memory": {"recompute": ["norms", "experts"]}}, world)
        assert config is not None, problems
        assert config.train.graph_shapes == 4


def test_the_dispatcher_without_counts_on_the_host_goes_with_graphs() -> None:
    for axis in ("ep", "etp"):
        config, problems = build(GRAPHS | {"mesh": {axis: 2}, "experts": {"dispatcher": "flex"}}, 2)
        assert config is not None, problems


def test_attention_goes_into_graphs_whatever_experts_do() -> None:
    layer = {"train": {"graphs": "layer"}, "mesh": {"ep": 2}, "memory": {"recompute": ["experts", "router"]}}
    for experts in ({"dispatcher": "all_to_all"}, {"dispatcher": "flex"}, {"record": "somewhere"}):
        config, problems = build({**layer, "experts": experts}, 2)
        assert config is not None, problems


def test_attention_of_wrapped_models_is_refused() -> None:
    config, problems = build({"train": {"graphs": "layer"}})
    assert config is not None, problems
    with pytest.raises(ConfigError, match=r'got model\.hf = "somewhere"; set model\.hf = "none"'):
        refuse_incompatible(replace(config, model=replace(config.model, hf="somewhere")))


def test_unknown_values_are_refused() -> None:
    _, problems = build({"train": {"graphs": "layers", "graph_shapes": 0}})
    assert any(line.startswith("train.graphs: expected") for line in problems)


def test_graphs_on_a_cpu_are_refused_but_planned_and_evaluated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = ["--train.graphs", "step", "--train.output_dir", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        load_config(given)
    assert end.value.code == 2
    assert 'train.graphs: expected a GPU for "step", got a run on cpu' in capsys.readouterr().err
    for flag in ("--dry-run", "--evaluate-only"):
        config = load_config([*given, flag]).config
        assert config.train.graphs == "step"
        config.train.require_device("cuda")


def test_a_loop_of_ones_own_meets_the_same_words() -> None:
    with pytest.raises(ConfigError, match=r"train\.graphs: expected a GPU"):
        TrainConfig(graphs="step").require_device("cpu")
    TrainConfig().require_device("cpu")


def test_a_number_of_shapes_without_graphs_is_refused() -> None:
    _, problems = build({"train": {"graph_shapes": 2}})
    assert any(line.startswith('train.graph_shapes: expected train.graphs = "step"') for line in problems)
    config, problems = build({"train": {"graph_shapes": 2, "graphs": "step"}})
    assert config is not None, problems
