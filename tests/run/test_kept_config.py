"""What has changed between two starts of a run, and which changes make another model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdmoe.config.first_start import read_first_start
from fsdmoe.config.kept import first_start_line, kept_text, write_kept
from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.run.kept_config import (
    _unread,
    decided,
    differences,
    refuse_other_model,
    refuse_other_optimizer,
    told_changes,
    warn_of_trained_documents,
)
from fsdmoe.testing import requires_peft
from tests.support.config_building import build
from tests.support.hf_tiny import tiny_hf
from tests.support.tiny_run import tiny_config

FOLDER = Path("runs/x")


def test_what_auto_takes_is_told_as_the_run_will_have_it() -> None:
    meshes: Any = SimpleNamespace(degrees=resolve_degrees(MeshConfig(ep=4), 4), device=torch.device("cpu"))
    config = tiny_config("runs/x", 4, mesh__ep=4)
    config = replace(config, model=replace(config.model, num_experts_per_tok=8))
    assert decided(config, meshes)["experts.dispatcher"].startswith("allgather (")
    cloned = replace(config, experts=replace(config.experts, clones=2))
    told = decided(cloned, meshes)["experts.dispatcher"]
    assert told == "all_to_all (2 slots a rank for clones of hot experts)"


def test_a_table_that_only_one_has_is_told_by_its_keys() -> None:
    before = tiny_config("run", 1)
    now = tiny_config("run", 1, experts__capacity__factor=2.0)
    assert differences(before, now)["experts.capacity.factor"] == "None -> 2.0"
    assert differences(before, before) == {}


def test_documents_that_were_trained_on_are_not_called_held_out_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fewer, more = (tiny_config("run", 1, data__holdout=share) for share in (0.01, 0.1))
    warn_of_trained_documents(more, fewer)
    warn_of_trained_documents(fewer, fewer)
    assert not caplog.messages
    warn_of_trained_documents(fewer, more)
    (told,) = caplog.messages
    assert told.startswith("data.holdout was 0.01: ")


def test_an_average_that_a_run_drops_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on, off, anew = (
        tiny_config(str(tmp_path), 1, checkpoint__load=load, optim__ema__decay=decay)
        for load, decay in (("latest", 0.99), ("latest", 0.0), ("none", 0.0))
    )
    write_kept(tmp_path, kept_text(on, {}, {}))
    told_changes(tmp_path, on)
    told_changes(tmp_path, anew)
    assert not caplog.messages
    told_changes(tmp_path, off)
    (told,) = caplog.messages
    assert told.startswith("optim.ema.decay was 0.99: the averaged weights in the checkpoint are not loaded")


def test_keys_that_leave_all_parameters_as_they_are_do_not_make_another_model() -> None:
    before = tiny_config("run", 1)
    now = tiny_config("run", 1, model__rope_theta=5e5, model__num_experts_per_tok=1, train__seed=4)
    refuse_other_model(before, now, FOLDER)


def test_another_preset_is_refused_by_its_name_first() -> None:
    before = tiny_config("run", 1)
    now = tiny_config("run", 1, model__preset="tiny-deepseek-v3")
    with pytest.raises(ConfigError, match=r"^model\.preset 'tiny-qwen3' -> 'tiny-deepseek-v3', .*: expected"):
        refuse_other_model(before, now, FOLDER)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optim__name": "muon"}, r"optim\.name 'adamw' -> 'muon'"),
        ({"optim__moment_dtype": "float8"}, r"optim\.moment_dtype 'float32' -> 'float8'"),
    ],
)
def test_another_optimizer_is_refused_by_its_key(change: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{told}: expected .*checkpoint\.load_only_model = true$"):
        refuse_other_optimizer(tiny_config("run", 1), tiny_config("run", 1, **change), FOLDER)


def test_moments_in_another_number_format_are_converted() -> None:
    now = tiny_config("run", 1, optim__moment_dtype="bfloat16")
    refuse_other_optimizer(tiny_config("run", 1), now, FOLDER)


def test_keys_that_a_run_no_longer_reads_once_it_has_begun_are_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {"precision__loss_scale__initial": 8.0, "train__steps": 4}
    before, now = (
        tiny_config(str(tmp_path), 1, checkpoint__load="latest", precision__param_dtype="float16", **each)
        for each in ({}, changes)
    )
    write_kept(tmp_path, kept_text(before, {}, {}))
    assert told_changes(tmp_path, now) == [
        "precision.loss_scale.initial None -> 8.0",
        "train.steps 20 -> 4",
    ]
    suffixes = [message.partition("; ")[2] for message in caplog.messages]
    assert suffixes == ["no effect: the scale is that of the checkpoint", ""]
    assert _unread("model.hf", now) == "weights are those of the checkpoint"
    assert _unread("model.hf", replace(now, checkpoint=replace(now.checkpoint, load="none"))) == ""


def test_another_start_is_refused_by_the_run_where_its_checkpoints_are_in_a_store(tmp_path: Path) -> None:
    before = tiny_config(str(tmp_path), 1, checkpoint__load="latest", checkpoint__folder="memory://runs/x")
    write_kept(tmp_path, kept_text(before, {}, {}))
    now = replace(before, checkpoint=replace(before.checkpoint, load="runs/y"))
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: expected \"latest\", since "):
        told_changes(tmp_path, now)


def test_the_first_start_is_kept_until_the_run_begins_anew(tmp_path: Path) -> None:
    def start(load: str, *, has_checkpoints: bool = True) -> str | None:
        config = tiny_config(str(tmp_path), 1, checkpoint__load=load)
        line = first_start_line(config, has_checkpoints=has_checkpoints)
        write_kept(tmp_path, kept_text(config, {}, {}, line))
        began = read_first_start((tmp_path / "config.toml").read_text())
        return None if began is None else began.load

    base = str(tmp_path / "base")
    assert start("memory://base", has_checkpoints=False) == "memory://base"
    assert start(base, has_checkpoints=False) == base, "the start before has failed, or saved nothing"
    for load in ("latest", base, str(tmp_path / "checkpoints/step_00000002"), str(tmp_path)):
        assert start(load) == base
    assert start("none") == "none"
    assert start("latest") == "none"


def test_a_run_of_an_earlier_version_keeps_the_start_that_it_knows(tmp_path: Path) -> None:
    for load, known in (("base", True), ("latest", False)):
        before, now = (tiny_config(str(tmp_path), 1, checkpoint__load=each) for each in (load, "latest"))
        write_kept(tmp_path, kept_text(before, {}, {}))
        assert bool(first_start_line(now, has_checkpoints=True)) is known


@requires_peft
def test_adapters_of_another_rank_are_refused_and_another_alpha_is_not(tmp_path: Path) -> None:
    model = tiny_hf("qwen3_moe", vocab_size=264)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    given = {"model": {"hf": str(tmp_path)}, "data": {"kind": "python-stdlib", "tokenizer": "bytes"}}
    before, wider, louder = (
        build(given | {"adapter": {"rank": rank, "alpha": alpha}})[0]
        for rank, alpha in ((2, 4.0), (4, 8.0), (2, 8.0))
    )
    assert None not in (before, wider, louder)
    refuse_other_model(before, louder, FOLDER)
    with pytest.raises(ConfigError, match=r"^adapter\.rank 2 -> 4: expected"):
        refuse_other_model(before, wider, FOLDER)
    without = replace(before, adapter=AdapterConfig())
    with pytest.raises(ConfigError, match=r"^adapter\.rank 0 -> 2: expected .*another train\.output_dir"):
        refuse_other_model(without, before, FOLDER)
