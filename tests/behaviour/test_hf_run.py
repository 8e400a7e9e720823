"""``train.py`` on a Hugging Face folder: any number of ranks, resumed, and what it refuses."""

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdmoe.config import Config, build_config, load_config, to_toml
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import requires_transformers, run_ranks
from fsdmoe.train import Run
from tests.support.hf_tiny import tiny_hf
from tests.support.moe_families import tiny_model
from tests.support.tiny_run import TINY

pytestmark = requires_transformers
STOP, STEPS = 3, 6


def config_for(hf: str, world_size: int, **overrides: Any) -> Config:
    """The tiny configuration on a folder, with dotted overrides (``__`` for the dot)."""
    mapping = copy.deepcopy(TINY) | {"model": {"hf": hf}, "experts": {}}
    mapping["data"] |= {"tokenizer": "bytes"}
    mapping["train"] |= {"steps": STEPS, "global_batch_size": 4, "eval_interval": STEPS}
    mapping["checkpoint"] |= {"load": "latest", "interval": STOP}
    problems: list[str] = []
    dotted = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    config = build_config(mapping, dotted, world_size, problems)
    if config is None:
        raise ConfigError(*problems)
    return config


def go(hf: str, folder: str, stop: int, overrides: dict[str, Any]) -> None:
    config = config_for(hf, dist.get_world_size(), train__output_dir=folder, **overrides)
    run = Run(config, build_meshes(config.mesh))
    while run.progress["step"] < stop:
        run.observer.log_step(run.train_step())
        run.checkpoints.maybe_save(run.progress["step"], run.state)
    run.close(run.loop([]) if stop == STEPS else "stopped")
    run.checkpoints.close()


def losses(folder: Path) -> list[tuple[float, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def folder_of(tmp_path: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    tiny_hf(family, vocab_size=264, **changes).save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    return tmp_path / "hf"


RECOMPUTE = {"memory__recompute": "layer"}
COURSES = [
    pytest.param(
        "qwen3_moe",
        (2, {"mesh__ep": 2} | RECOMPUTE),
        (2, {"mesh__ep": 2} | RECOMPUTE),
        marks=pytest.mark.full,
    ),
    ("mixtral", (2, {"mesh__tp": 2, "mesh__ep": 2}), (2, {"mesh__cp": 2})),
    pytest.param(
        "mixtral",
        (4, {"mesh__cp": 2, "mesh__tp": 2, "mesh__ep": 4}),
        (2, {"mesh__cp": 2}),
        marks=pytest.mark.full,
    ),
    pytest.param("llama", (2, RECOMPUTE), (2, {"mesh__tp": 2}), marks=pytest.mark.full),
    pytest.param(
        "deepseek_v3",
        (2, {"context_parallel__dynamic": True, "context_parallel__max_tokens": 32, "mesh__ep": 2}),
        (4, {"mesh__tp": 2, "context_parallel__mode": "all_gather", "mesh__cp": 2} | RECOMPUTE),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("family", "first", "then"), COURSES)
def test_any_layout_equals_one_rank_and_a_run_goes_on_from_its_checkpoint_under_another(
    tmp_path: Path, family: str, first: tuple[int, dict[str, Any]], then: tuple[int, dict[str, Any]]
) -> None:
    hf = folder_of(tmp_path, family)
    run_ranks(go, 1, str(hf), str(tmp_path / "one"), STEPS, {})
    expected = losses(tmp_path / "one")
    assert len(expected) == STEPS
    assert expected[-1][0] < expected[0][0] - 0.05, "the run learns, so the comparison means something"
    run_ranks(go, first[0], str(hf), str(tmp_path / "split"), STOP, first[1])
    for weights in hf.glob("*.safetensors"):
        weights.unlink()  # a run that goes on needs its own weights, not those it came from
    run_ranks(go, then[0], str(hf), str(tmp_path / "split"), STEPS, then[1])
    got = losses(tmp_path / "split")
    assert len(got) == STEPS
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=2e-5), f"step {step}"


def refused_run(hf: str, folder: str) -> str:
    """What train.py says of packed rows, if anything, before the first step."""
    config = config_for(hf, 1, train__output_dir=folder)
    try:
        Run(config, build_meshes(config.mesh)).close("built")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_family_with_recurrent_layers_trains_on_one_document_a_row_and_not_on_packed_ones(
    tmp_path: Path,
) -> None:
    tiny_model("lfm2_moe", vocab_size=264).save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    (refusal,) = run_ranks(refused_run, 1, str(tmp_path / "hf"), str(tmp_path / "packed"))
    assert "model.layers.0.conv (Lfm2MoeShortConv)" in refusal
    assert "set data.pack = false" in refusal
    run_ranks(go, 1, str(tmp_path / "hf"), str(tmp_path / "single"), STOP, {"data__pack": False})
    assert len(losses(tmp_path / "single")) == STOP


def problem_of(hf: Path, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_for(str(hf), 4, **overrides)
    return str(caught.value)


def test_what_a_folder_cannot_be_asked_for_is_refused_by_name(tmp_path: Path) -> None:
    hf = folder_of(tmp_path)
    assert "model.hf: expected a folder" in problem_of(tmp_path / "nowhere")
    assert "model.hidden_size: the folder of model.hf means 16" in problem_of(hf, model__hidden_size=32)
    assert "mesh.tp: expected a divisor of 2 and 2 heads" in problem_of(hf, mesh__tp=4)
    assert "data.seq_len: expected a multiple of mesh.cp" in problem_of(hf, mesh__cp=4, data__seq_len=30)
    assert "mesh.ep: expected a divisor of the 8 experts, got 3" in problem_of(hf, mesh__ep=3)
    assert "train.recompute: is memory.recompute now" in problem_of(hf, train__recompute="norms")


def test_attention_that_rows_cannot_be_split_for_is_refused_by_the_key_of_the_models_configuration(
    tmp_path: Path,
) -> None:
    hf = folder_of(tmp_path, "mixtral", sliding_window=8, attention_dropout=0.1)
    problem = problem_of(hf, mesh__cp=2)
    assert (
        "mesh.cp: expected attention to whole rows of data.seq_len = 32 tokens, got sliding_window = 8"
        in problem
    )
    assert "choose data.seq_len of at most 8" in problem
    assert "mesh.cp: expected attention_dropout = 0" in problem
    assert config_for(str(hf), 4).mesh.cp == 1
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    hf = folder_of(tmp_path, "llama", rope_parameters=rope | {"alpha": 1000.0})
    problem = problem_of(hf, context_parallel__dynamic=True)
    assert "got rope_type = dynamic, whose form here is not known (rope_parameters.alpha" in problem
    hf = folder_of(tmp_path, "llama", rope_parameters=rope)
    assert config_for(str(hf), 2, mesh__cp=2).mesh.cp == 2


def test_a_limit_of_attention_names_the_setting_that_meets_it(tmp_path: Path) -> None:
    hf = folder_of(tmp_path, "mixtral", sliding_window=8)
    problem = problem_of(hf, mesh__tp=2)
    assert problem.startswith("mesh.tp: expected attention to whole rows")
    assert "mesh.cp" not in problem
    problem = problem_of(hf, context_parallel__dynamic=True)
    assert problem.startswith("context_parallel.dynamic: expected")
    assert "mesh." not in problem
    assert problem.endswith("or set context_parallel.dynamic = false")
    problem = problem_of(hf, mesh__cp=2, mesh__tp=2)
    assert problem.startswith("mesh.cp: ")
    assert problem.endswith("or set mesh.cp = 1 and mesh.tp = 1")


def test_a_printed_configuration_reads_back_to_the_same(tmp_path: Path) -> None:
    config = config_for(str(folder_of(tmp_path)), 1)
    assert (config.model.num_experts, config.model.hidden_size, config.model.vocab_size) == (8, 16, 264)
    problems: list[str] = []
    assert build_config(tomllib.loads(to_toml(config)), {}, 1, problems) == config, problems


def build_small(hf: str, folder: str) -> str:
    config = config_for(hf, 1, train__output_dir=folder)
    with pytest.raises(ConfigError) as caught:
        Run(config, build_meshes(config.mesh))
    return str(caught.value)


def in_home(home: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        patch.chdir(home)
        config = config_for("~/hf", 1, train__output_dir="~/run", checkpoint__interval=1, train__steps=1)
        run = Run(config, build_meshes(config.mesh))
        run.close(run.loop([]))
        run.checkpoints.close()
    return sorted(path.name for path in (Path(home) / "run").iterdir())


def test_a_tilde_is_the_home_folder_for_the_run_and_the_model(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (names,) = run_ranks(in_home, 1, str(tmp_path))
    assert names == ["checkpoints", "events.jsonl", "loss.svg", "metrics.jsonl", "summary.txt"]


def test_a_folder_without_weights_is_refused_by_its_key(tmp_path: Path) -> None:
    tiny_hf("qwen3_moe", vocab_size=264).config.save_pretrained(tmp_path / "hf")  # type: ignore[union-attr, operator]
    (message,) = run_ranks(build_small, 1, str(tmp_path / "hf"), str(tmp_path / "run"))
    assert message.startswith("model.hf: expected weights (*.safetensors) next to the config.json, got none")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_hf("qwen3_moe").config.save_pretrained(tmp_path / "hf")  # type: ignore[union-attr, operator]
    given = ["--model.hf", str(tmp_path / "hf"), "--train.output_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        load_config([*given, "--data.kind", "python-stdlib", "--data.tokenizer", "bytes"])
    assert end.value.code == 2
    expected = "model.vocab_size: the tokenizer has 264 tokens, the model 64; set data.tokenizer"
    assert expected in capsys.readouterr().err
