"""The lines of the start's card that no run of one small rank shows."""

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from fsdmoe.config import Config
from fsdmoe.data import DataConfig, build_data
from fsdmoe.data.stream import SourceFacts
from fsdmoe.experts.config import BalanceConfig
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.models import build_model
from fsdmoe.models.config import preset_config
from fsdmoe.models.flops import idle_expert_params
from fsdmoe.run.facts import (
    _weights_text,
    adapters_text,
    balance_text,
    data_text,
    evaluation_text,
    graphs_text,
    loss_text,
    mesh_axes,
    what_if_uneven,
)
from fsdmoe.testing import requires_peft
from tests.support.hf_tiny import tiny_hf
from tests.support.scripts import ROOT
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


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"mesh__ep": 2}, "balance experts more"),  # too few rows for a clone to be worth sending
        ({"mesh__ep": 2, "experts__clone_rows": 0}, "experts.clones = 2"),
        (
            {"mesh__ep": 2, "experts__clone_rows": 0, "experts__dispatcher": "allgather"},
            "balance experts more",
        ),
        ({"mesh__ep": 2, "experts__clone_rows": 0, "experts__clones": 1}, ""),
    ],
)
def test_what_to_do_about_a_busy_rank_is_what_the_run_can_have(
    changes: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    found = what_if_uneven(tiny_config(str(tmp_path), 2, **changes), 2)
    assert found.startswith(advice)
    assert bool(found) == bool(advice)


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
    loaded = "runs/x/checkpoints/step_7"  # a run that has begun resumes its own, whatever checkpoint.load is
    assert _weights_text(config, 0, loaded) == f"{loaded}, weights only (checkpoint.load_only_model)"
    assert _weights_text(config, 7, loaded) == f"checkpoint of step 7 ({loaded})"
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


def test_the_share_of_tokens_with_loss_is_estimated_from_the_beginning_of_each_source() -> None:
    answers = SimpleNamespace(targets=np.array([1, 0, 0, 0], np.uint8))
    text = SimpleNamespace(targets=None)

    def share(*stores: Any, without_loss: str = "") -> str:
        facts = [SimpleNamespace(name="a", weight=1 / len(stores), without_loss=without_loss) for _ in stores]
        return loss_text(SimpleNamespace(stores=stores, sources=lambda: facts))  # type: ignore[arg-type]

    assert share(text, text) == "on every token"
    assert share(answers, text) == "on 62.5% of the tokens (estimated from the first 1M of each source)"
    assert share(answers, without_loss="2 records (a:3)").endswith("; warning: a has 2 records (a:3)")


def test_a_small_held_out_slice_is_warned_of_and_that_of_the_quick_start_is_not(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one\n\ntwo\n\nthree")
    small = DataConfig(kind="text", path=str(tmp_path), separator="\n\n", holdout=0.2)
    quick_start = DataConfig(**tomllib.loads((ROOT / "configs/quickstart.toml").read_text())["data"])
    texts = []
    for data in (small, quick_start):
        config = replace(tiny_config("runs/x", 1), data=data)
        with build_data(
            data, dp_rank=0, dp_size=1, micro_batch_size=1, global_batch_size=8, seed=0
        ) as opened:
            texts.append(evaluation_text(config, opened))
    assert texts[0].startswith("every 10 steps and at the end, on up to 8 rows of 1 held-out document,")
    assert texts[0].endswith("warning: so few that the loss on them is mostly chance, raise data.holdout")
    assert "warning" not in texts[1]


def test_it_is_said_what_balances_the_experts_and_warned_where_nothing_does() -> None:
    def balance(model: nn.Module, **overrides: Any) -> str:
        return balance_text(tiny_config("runs/x", 1, **overrides), model)

    assert balance(nn.Module()) == "sequence 0.01 (experts.balance)"
    even = "sequence 0.01, bias_rate 0.001 (experts.balance)"
    assert balance(nn.Module(), experts__balance__bias_rate=0.001) == even
    nothing = "warning: nothing keeps the experts' loads even"
    assert balance(nn.Module(), experts__balance__sequence=0).startswith(nothing)
    config = tiny_config("runs/x", 1)
    config = replace(config, model=replace(config.model, hf="somewhere"))
    own = SimpleNamespace(router_aux_loss_coef=0.05, output_router_logits=True)
    wrapped: Any = SimpleNamespace(config=own)
    both = "sequence 0.01 (experts.balance); the model's own auxiliary loss, router_aux_loss_coef 0.05"
    assert balance_text(config, wrapped) == both
    off = replace(config, experts=replace(config.experts, balance=BalanceConfig()))
    assert balance_text(off, wrapped) == "the model's own auxiliary loss, router_aux_loss_coef 0.05"
    without = replace(off, experts=replace(off.experts, balance=BalanceConfig(family=False)))
    assert balance_text(without, wrapped).startswith(nothing)
    own.output_router_logits = False
    assert balance_text(config, wrapped) == "sequence 0.01 (experts.balance)"
    assert balance_text(off, wrapped).startswith(nothing)


@requires_peft
def test_adapters_are_told_by_rank_targets_and_what_is_trained(tmp_path: Path) -> None:
    tiny_hf("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    config = replace(tiny_config("runs/x", 1), adapter=AdapterConfig(rank=4))
    text = adapters_text(config, build_folder_model(str(tmp_path), config.adapter))
    assert text.startswith("lora of rank 4 on q_proj, k_proj, v_proj, o_proj, experts; ")
    assert text.endswith("% of all")
