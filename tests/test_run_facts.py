"""The lines of the start's card that no run of one small rank shows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fsdmoe.config import Config
from fsdmoe.data import DataConfig
from fsdmoe.data.stream import SourceFacts
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.models import build_model
from fsdmoe.models.config import preset_config
from fsdmoe.models.flops import idle_expert_params
from fsdmoe.run_facts import _weights_text, data_text, graphs_text, mesh_axes
from tests.support.tiny_run import tiny_config


@pytest.mark.parametrize(
    ("preset", "total", "active"), [("qwen3-30b-a3b", 30.5e9, 3.3e9), ("mixtral-8x7b", 46.7e9, 12.9e9)]
)
def test_active_parameters_are_the_published_ones(preset: str, total: float, active: float) -> None:
    config = preset_config(preset)
    num_parameters = sum(p.numel() for p in build_model(config).parameters())
    assert num_parameters == pytest.approx(total, rel=5e-3)
    assert num_parameters - idle_expert_params(config) == pytest.approx(active, rel=2e-2)


def test_the_mesh_is_shown_where_an_axis_is_above_one() -> None:
    assert mesh_axes(resolve_degrees(MeshConfig(), 1)) == []
    assert mesh_axes(resolve_degrees(MeshConfig(tp=2, ep=4), 16)) == ["dp_shard 8", "tp 2", "ep 4"]


def test_a_mixture_shows_its_first_sources_with_their_shares() -> None:
    dropped = {"without text": 60}
    facts = [
        SourceFacts(f"{n}.txt", 1500, 2_500_000, n / 20, 0, 0.0, dropped if n == 1 else {})
        for n in (1, 2, 3, 4, 10)
    ]
    text = data_text(SimpleNamespace(sources=lambda: facts, vocab_size=264), DataConfig())  # type: ignore[arg-type]
    assert text == (
        "1.txt (5% of the tokens): 1,500 documents, 2.5M tokens, left out: 60 without text; "
        "2.txt (10% of the tokens): 1,500 documents, 2.5M tokens; "
        "3.txt (15% of the tokens): 1,500 documents, 2.5M tokens; "
        "and 2 more sources; tokenizer bytes, 264 ids"
    )


def test_weights_are_named_by_where_they_came_from() -> None:
    config: Config = tiny_config("runs/x", 1, checkpoint__load="runs/a", checkpoint__load_only_model=True)
    assert _weights_text(config, 0) == "runs/a, weights only (checkpoint.load)"
    assert _weights_text(config, 7) == "checkpoint of step 7 (checkpoint.load = runs/a)"
    of_folder = replace(config, model=replace(config.model, hf="models/b"))
    assert _weights_text(of_folder, None) == "models/b (model.hf)"


def test_memory_that_stays_with_graphs_is_planned_and_grows_with_the_micro_batch() -> None:
    texts = [
        graphs_text(
            tiny_config(
                "run",
                1,
                train__graphs="step",
                train__micro_batch_size=size,
                precision__param_dtype="bfloat16",
            ),
            1,
        )
        for size in (1, 4)
    ]
    small, large = (float(text.split("about ")[1].split()[0]) for text in texts)
    assert texts[0].startswith("micro-batches are captured, of up to 4 shapes")
    assert 0 < small < large
