"""``fsdmoe train`` refuses before it starts a rank, and says the cause alone."""

import argparse
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import fsdmoe
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc-per-node", "many"], "--nproc-per-node: expected a number above 0, gpu, cpu or auto, got"),
        (["--nproc-per-node", "gpu"], "--nproc-per-node: expected a host with GPUs, got gpu where there is"),
        (["--nnodes", "2:1"], "--nnodes: expected a number above 0 or MIN:MAX, got '2:1'; write 1:2"),
        (["--nproc-per-node", "2", "--master-port", "auto"], "--master-port: expected a number below 65536"),
        (["--nnodes", "2"], "--rdzv-endpoint: expected a host and port where 2 hosts meet, got none; write"),
    ],
)
def test_an_option_of_the_launcher_is_refused_by_its_name(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 0)
    monkeypatch.setattr(ranks, "_start_ranks", lambda *_: pytest.fail("started"))
    assert ranks.launch([*words, *QUICK]) == 2
    assert capsys.readouterr().err.startswith(f"fsdmoe: {said}")


def test_a_port_that_another_program_listens_on_is_refused() -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        (line,) = ranks.meeting_problems({"--master-port": port}, 1)
    assert line.startswith(f"--master-port: expected a free port, got {port}, which another program")
    assert ranks.meeting_problems({"--master-port": port}, 1) == []


def test_a_host_without_an_address_is_named_at_once_and_refused_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(ranks.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(ranks.time, "sleep", lambda _: None)
    (line,) = ranks.meeting_problems({"--rdzv-endpoint": "nohost:29400"}, 2)
    said = "--rdzv-endpoint: expected a host that is known here, got 'nohost' (Name or service not known); "
    assert line == f"{said}name one that all hosts know"
    assert capsys.readouterr().err == f"fsdmoe: {said}waiting for it: correct it if it is misspelt\n"


def test_a_rank_for_each_gpu_is_a_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_gpus", lambda: 8)
    assert [ranks.ranks_here(written) for written in (None, "gpu", "auto", "3")] == ["8", "8", "8", "3"]


def test_every_option_of_torchrun_is_taken_but_those_that_name_a_program() -> None:
    known = torch.distributed.run.get_args_parser()._actions
    names = [name for action in known for name in action.option_strings]
    for name in {*names} - {"-h", "--help", "-m", "--module", "--no-python", "--no_python"}:
        if "run" not in name:
            assert ranks.split_options([name, "1"])[1] in ([], ["1"]), name


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        ([-9], 137, "fsdmoe: for want of memory\n"),
        ([-9, 1], 137, "fsdmoe: for want of memory\n"),
        ([2], 2, ""),
        ([-9, 75], 75, ""),  # the first rank was stopped, the other ended for it, torchrun killed the first
        ([75, -9], 75, ""),
    ],
)
def test_a_killed_rank_s_cause_is_said_and_what_a_rank_said_is_not_repeated(
    ended: list[int],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    for rank, exit_code in enumerate(ended):
        # what a killed rank leaves was written at its start
        text, time = ("for want of memory", "1") if exit_code == -9 else ("what a rank said itself", "2")
        file = tmp_path / str(rank)
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": time}}}))
        found[rank] = ProcessFailure(rank, 1, exit_code, str(file))

    def fail(_: object) -> None:
        raise ChildFailedError("train", found)

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
        (["plan"], "fsdmoe: model and --gpus: expected, got none"),
        (["observe", "compare", "nowhere"], "fsdmoe: nowhere"),
        (["compare"], "choose one of train, check, plan, launch, checkpoint, observe, data\n"),
    ):
        monkeypatch.setattr("sys.argv", ["fsdmoe", *words])
        assert command() == 2
        assert said in capsys.readouterr().err


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fsdmoe", "--version"])
    assert command() == 0
    assert capsys.readouterr().out == f"fsdmoe {fsdmoe.__version__}\n"


@pytest.mark.full
def test_two_ranks_are_started_and_train(tmp_path: Path) -> None:
    given = [*QUICK, "--train.steps", "2", "--train.output_dir", str(tmp_path), "--data.max_bytes", "100000"]
    done = run_program("fsdmoe/__main__.py", "train", "--nproc-per-node", "2", *given)
    assert done.wait() == 0, done.stderr
    assert done.stderr.startswith("fsdmoe: a run on 2 ranks, by configs/quickstart.toml; loading torch\n")
    assert "2 x CPU" in done.stdout + done.stderr


def test_a_fixed_mesh_that_fewer_hosts_cannot_have_is_refused_before_ranks_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--config", "configs/quickstart.toml", "--mesh.ep", "2", "--nproc-per-node", "1"]
    assert ranks.launch(["--nnodes", "1:2", *words]) == 2
    assert "set mesh.elastic = true" in capsys.readouterr().err
