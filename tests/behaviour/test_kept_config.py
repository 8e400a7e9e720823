"""A run keeps its configuration in its folder: what it was, what changed since, and how to go on with it."""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.config import build_config, to_toml
from fsdmoe.config.kept import open_run
from fsdmoe.core import events
from fsdmoe.observe.timeline import changes_of
from tests.support.scripts import Program, run_program, started_ranks
from tests.support.tiny_run import tiny_config

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {
    "train__steps": 2,
    "train__eval_interval": -1,
    "checkpoint__interval": 0,
    "checkpoint__load": "latest",
}


def write_config(folder: Path, **changes: Any) -> str:
    path = folder / "run.toml"
    path.write_text(to_toml(tiny_config(str(folder / "run"), 2, **(RUN | changes))))
    return str(path)


def train(*arguments: str) -> Program:
    return run_program("train.py", *arguments)


def trained(*arguments: str) -> str:
    """What a run that ended well printed."""
    done = train(*arguments)
    assert done.wait() == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder above a run of two ranks that share the experts."""
    folder = tmp_path_factory.mktemp("kept")
    changes = {"train__eval_interval": 2, "memory__recompute": "auto"}
    command = ["--config", write_config(folder, **changes), "--mesh.ep", "2"]
    with started_ranks(2, "train.py", *command) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    return folder


def test_its_folder_holds_the_configuration_that_was_used(run_of_two_ranks: Path) -> None:
    text = (run_of_two_ranks / "run/config.toml").read_text()
    config = tiny_config(
        str(run_of_two_ranks / "run"),
        2,
        **(RUN | {"train__eval_interval": 2, "mesh__ep": 2, "memory__recompute": "auto"}),
    )
    assert build_config(tomllib.loads(text), {}, 2, []) == config
    assert "mesh.ep" in text.split("[model]")[0]
    assert "command line" in text
    assert 'decided by "auto": nothing (' in text, "of memory.recompute"
    assert 'decided by "auto": allgather' in text or 'decided by "auto": all_to_all' in text
    assert not list((run_of_two_ranks / "run").glob("*.unfinished"))


def test_changes_are_told_once_as_keys_before_anything_is_loaded(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    trained("--config", config)
    changes = ["--train.steps", "3", "--model.num_experts_per_tok", "1"]
    printed = trained("--config", config, *changes)
    lines = printed.splitlines()
    told = [index for index, line in enumerate(lines) if line.startswith("changed since ")]
    assert [lines[index] for index in told] == [
        "changed since the last start: model.num_experts_per_tok 2 -> 1",
        "changed since the last start: train.steps 2 -> 3",
    ]
    (resumed,) = [index for index, line in enumerate(lines) if line.startswith("resumed ")]
    assert max(told) < resumed
    (changed,) = changes_of(events.read(tmp_path / "run"))
    assert changed == "from step 3 on: model.num_experts_per_tok 2 -> 1, train.steps 2 -> 3"
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["train"]["steps"] == 3


@pytest.mark.parametrize("load", ["latest", "none"])
def test_another_model_is_refused_by_its_keys_on_all_ranks(run_of_two_ranks: Path, load: str) -> None:
    folder = run_of_two_ranks / "run"
    before = (folder / "config.toml").read_text()
    command = ["--config", str(folder.parent / "run.toml"), "--mesh.ep", "2", "--checkpoint.load", load]
    more = ["--model.num_experts", "4", "--model.num_experts_per_tok", "1", "--train.steps", "4"]
    with started_ranks(2, "train.py", *command, *more) as ranks:
        assert [rank.wait() for rank in ranks] == [2, 2]
        said = ranks[0].stderr
    # Tokens go to one expert now, with the same parameters: that is no reason.
    assert f"fsdmoe: model.num_experts 8 -> 4: expected the model of the checkpoints in {folder}" in said
    assert "give this run another train.output_dir" in said
    assert "sharded" not in said
    assert (folder / "config.toml").read_text() == before


@pytest.mark.full
def test_another_model_may_have_a_folder_without_checkpoints(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint__interval=-1)
    trained("--config", config)
    trained("--config", config, "--model.num_experts", "4")
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["model"]["num_experts"] == 4


@pytest.mark.full
def test_a_folder_of_an_earlier_version_resumes_and_a_failed_start_claims_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    trained("--config", config)
    (tmp_path / "run/config.toml").unlink()
    failed = train("--config", config, "--model.num_experts", "4", "--train.steps", "3")
    assert failed.wait() != 0
    assert not (tmp_path / "run/config.toml").exists()
    assert "changed since it was saved: train.steps 2 -> 3" in trained(
        "--config", config, "--train.steps", "3"
    )
    assert (tmp_path / "run/config.toml").is_file()


@pytest.mark.full
def test_the_command_that_began_a_run_goes_on_after_a_start_without_its_checkpoint(
    run_of_two_ranks: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, checkpoint__load_only_model=False)
    first = ["--checkpoint.load", os.path.relpath(run_of_two_ranks / "run")]
    trained("--config", config, "--train.steps", "3", *first)
    trained("--config", config, "--train.steps", "4")
    printed = trained("--config", config, "--train.steps", "5", *first)
    assert f"resumed {tmp_path}/run/checkpoints/step_00000004" in printed


def test_a_run_goes_on_and_is_evaluated_by_its_folder_alone(run_of_two_ranks: Path, tmp_path: Path) -> None:
    """On one rank, after two that shared the experts; moved, and started from scratch at first."""
    run = tmp_path / "moved"
    shutil.copytree(run_of_two_ranks / "run", run)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('load = "latest"', 'load = "none"'))
    (row,) = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if "eval_loss" in row]
    printed = trained("--run", str(run), "--evaluate-only")
    assert "the mesh of the run is not for 1 ranks" in printed
    (loss,) = re.findall(r"^held-out loss (\S+?),", printed, re.M)
    assert float(loss) == pytest.approx(row["eval_loss"], rel=1e-4)
    printed = trained("--run", str(run), "--train.steps", "3", "--mesh.ep", "1")
    assert f"resumed {run}/checkpoints/step_00000002" in printed
    assert (run / "checkpoints/step_00000003").is_dir()
    kept = (run / "config.toml").read_text()
    assert tomllib.loads(kept)["train"]["output_dir"] == str(run)
    assert re.search(r"^#   train.steps +command line$", kept, re.M)
    assert re.search(rf"^#   train.seed +{run_of_two_ranks}/run.toml$", kept, re.M), "as at its first start"


def test_a_relative_folder_of_checkpoints_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = tmp_path / "ckpts", tmp_path / "run"
    relative = os.path.relpath(folder, ROOT)
    trained("--config", write_config(tmp_path), "--checkpoint.folder", relative)
    assert "steps 3 to 3" in trained("--resume", str(run), "--train.steps", "3")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    problems: list[str] = []
    assert Path(open_run(str(run), problems)[0]["checkpoint"]["folder"]).resolve() == folder
    Path(relative).mkdir(parents=True)
    assert open_run(str(run), problems)[0]["checkpoint"]["folder"] == relative, "a copy has its own"
    shutil.rmtree(tmp_path / relative) if ".." not in relative else shutil.rmtree(Path(relative))
    another = ["--config", str(run / "config.toml"), "--train.output_dir", str(tmp_path / "second")]
    refused = train(*another)
    assert refused.wait() != 0
    assert "checkpoint.folder: expected another one than" in refused.stderr
    trained(*another, "--checkpoint.folder", str(tmp_path / "others"))
    shutil.rmtree(folder)
    assert "has saved step 3, and " in trained("--resume", str(run), "--train.steps", "1")
