"""Samples during training: the same on any mesh, printed and logged."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdmoe.config import Config, build_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig
from fsdmoe.mesh import build_meshes
from fsdmoe.run import samples
from fsdmoe.testing import requires_transformers, run_ranks
from fsdmoe.train import Run
from tests.behaviour.test_hf_run import config_for, folder_of
from tests.support.tiny_run import tiny_config

PROMPTS = {"train__sample_prompts": "def main(,import os", "train__steps": 2}


def run_with(config: Config) -> dict[str, str]:
    """Of eight tokens each: every one is a forward."""
    with mock.patch.object(samples, "NEW_TOKENS", 8):
        run = Run(config, build_meshes(config.mesh))
        run.close(run.loop([]))
        return run.samples.generate(run.decoder)


LAYOUTS = [
    pytest.param({"mesh__ep": 2}, 2, id="ep"),
    pytest.param({"mesh__tp": 2}, 2, id="tp", marks=pytest.mark.full),
    pytest.param({"mesh__cp": 2, "mesh__tp": 2, "mesh__ep": 4}, 4, id="all", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("mesh", "ranks"), LAYOUTS)
def test_samples_are_those_of_one_process_and_are_logged(
    tmp_path: Path, mesh: dict[str, int], ranks: int
) -> None:
    (want,) = run_ranks(run_with, 1, tiny_config(str(tmp_path / "one"), 1, **PROMPTS))
    config = tiny_config(str(tmp_path / "many"), ranks, **PROMPTS, **mesh)
    assert run_ranks(run_with, ranks, config) == [want] * ranks
    assert list(want) == ["def main(", "import os"]
    rows = map(json.loads, (tmp_path / "many/metrics.jsonl").read_text().splitlines())
    assert [row for row in rows if "samples" in row] == [{"step": 2, "samples": want}]


@pytest.mark.parametrize(("prompt", "vocab_size"), [("", 264), ("def", 64)])
def test_a_prompt_that_the_model_cannot_read_is_refused_at_the_start(prompt: str, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=r"train.sample_prompts: .* model's \d+ tokens .*; write another"):
        samples.Samples([prompt], DataConfig(), torch.device("cpu"), vocab_size=vocab_size)


def last_logits(config: Config) -> list[torch.Tensor]:
    """The last logits of a prompt, alone and with the padding that samples have."""
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))
    seen: list[torch.Tensor] = []

    def look(tokens_1S: torch.Tensor, **given: Any) -> Any:
        out = run.decoder(tokens_1S, **given)
        seen.append(out.logits_BSV[0, 8])
        return out

    look.eval, look.config = run.decoder.eval, run.decoder.config  # type: ignore[attr-defined]
    tokens_1S = torch.arange(1, 10)[None]
    with torch.no_grad(), mock.patch.object(samples, "NEW_TOKENS", 1):
        run.decoder.eval()
        look(tokens_1S)
        run.samples._of_decoder(look, tokens_1S[0].tolist())  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize(
    "keys",
    [
        {"experts__capacity__factor": 1.25, "experts__capacity__scope": "sequence"},
        {"experts__selection": "expert_choice", "experts__balance__sequence": 0.0},
        {"model__rope__type": "dynamic", "model__rope__factor": 2.0, "model__max_position_embeddings": 8},
    ],
    ids=["capacity", "expert choice", "positions by length"],
)
def test_padding_changes_nothing_of_a_prompt(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = tiny_config(str(tmp_path), 1, **PROMPTS, **keys)
    ((alone, padded),) = run_ranks(last_logits, 1, config)
    torch.testing.assert_close(padded, alone)


@pytest.mark.full
@requires_transformers
def test_wrapped_models_go_on_as_generate_does(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        folder = {"train__output_dir": str(tmp_path / str(ranks)), "mesh__ep": ranks}
        config = config_for(str(folder_of(tmp_path)), ranks, **PROMPTS, **folder)
        found += run_ranks(run_with, ranks, config)
    assert found[0] == found[1] == found[2]


def test_prompts_without_evaluations_are_refused() -> None:
    problems: list[str] = []
    build_config({"train": {"sample_prompts": ["a", ""], "eval_interval": -1}}, {}, 1, problems)
    assert [problem.partition(": expected ")[2][:11] for problem in problems] == [
        "texts, got ",
        "evaluations",
    ]
