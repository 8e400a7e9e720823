"""A run keeps its configuration in its folder: what it was, what changed since, and how to go on with it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.config import build_config, to_toml
from tests.support.scripts import Program, run_program, started_ranks
from tests.support.tiny_run import tiny_config

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
    command = ["--config", write_config(folder, train__eval_interval=2), "--mesh.ep", "2"]
    with started_ranks(2, "train.py", *command) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    return folder


def test_its_folder_holds_the_configuration_that_was_used(run_of_two_ranks: Path) -> None:
    text = (run_of_two_ranks / "run/config.toml").read_text()
    config = tiny_config(
        str(run_of_two_ranks / "run"), 2, **(RUN | {"train__eval_interval": 2, "mesh__ep": 2})
    )
    assert build_config(tomllib.loads(text), {}, 2, []) == config
    assert "mesh.ep" in text.split("[model]")[0]
    assert "command line" in text
    assert 'decided by "auto": allgather' in text or 'decided by "auto": all_to_all' in text
    assert not list((run_of_two_ranks / "run").glob("*.unfinished"))
