"""``fsdmoe train`` refuses before it starts a rank, and says the cause alone."""

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdmoe.__main__ import main as command
from fsdmoe.config.command_line import CHECKED
from fsdmoe.launch import ranks
from tests.support.scripts import run_program

QUICK = ["--config", "configs/quickstart.toml"]


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher changes in its own process."""
    monkeypatch.setenv(CHECKED, "")
    yield
    logging.disable(logging.NOTSET)


def test_options_of_torchrun_may_stand_anywhere() -> None:
    words = ["--nproc_per_node=4", *QUICK, "--nnodes", "2", "--mesh.ep", "4"]
    assert ranks.split_options(words) == (
        {"--nproc-per-node": "4", "--nnodes": "2"},
        [*QUICK, "--mesh.ep", "4"],
    )


def test_a_refused_configuration_starts_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "_start_ranks", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        ranks.launch(["--nproc-per-node", "2", *QUICK, "--lr", "1"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "fsdmoe: --lr: unknown option; did you mean optim.lr?\n"
    assert ranks.launch(["--nproc-per-node", "many"]) == 2
    assert "--nproc-per-node: expected a number of ranks, got 'many'" in capsys.readouterr().err


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(("ended", "code", "said"), [(-9, 137, "fsdmoe: for want of memory\n"), (2, 2, "")])
def test_a_killed_rank_s_cause_is_said_and_what_a_rank_said_is_not_repeated(
    ended: int,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = {"message": {"message": "for want of memory", "extraInfo": {"timestamp": "1"}}}
    (tmp_path / "error").write_text(json.dumps(message))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=ended, error_file=str(tmp_path / "error"))

    def fail(_: object) -> None:
        raise ChildFailedError("train", {0: failure})

    monkeypatch.setattr(torch.distributed.run, "run", fail)
    capsys.readouterr()
    assert ranks._start_ranks({"--nproc-per-node": "2"}, QUICK) == code
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("as_before")
def test_options_that_begin_as_torchrun_s_own_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[argparse.Namespace] = []
    monkeypatch.setattr(torch.distributed.run, "run", started.append)
    words = ["--run", "runs/ep2", "--log", "1"]
    assert ranks._start_ranks({"--nproc-per-node": "2"}, words) == 0
    assert started[0].nproc_per_node == "2"
    assert [started[0].training_script, *started[0].training_script_args] == ["fsdmoe", "train", *words]


def test_commands_of_packages_are_run_and_others_are_answered_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["plan"], "fsdmoe: model and --gpus: expected both"),
        (["observe", "compare", "nowhere"], "fsdmoe: nowhere"),
        (["compare"], "choose one of train, check, plan, launch, checkpoint, observe, data\n"),
    ):
        monkeypatch.setattr("sys.argv", ["fsdmoe", *words])
        assert command() == 2
        assert said in capsys.readouterr().err


@pytest.mark.full
def test_two_ranks_are_started_and_train(tmp_path: Path) -> None:
    given = [*QUICK, "--train.steps", "2", "--train.output_dir", str(tmp_path), "--data.max_bytes", "100000"]
    done = run_program("fsdmoe/__main__.py", "train", "--nproc-per-node", "2", *given)
    assert done.wait() == 0, done.stderr
    assert done.stderr.startswith("fsdmoe: a run on 2 ranks, by configs/quickstart.toml; loading torch\n")
    assert "2 x CPU" in done.stdout + done.stderr
