"""How runs end: who speaks, what counts as a lost peer, and what is left of the process group."""

import contextlib
import io
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdmoe.config import Config
from fsdmoe.core import failures, lifecycle
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.failures import free_some, lost_peer_message, report_error
from fsdmoe.core.lifecycle import Ending, signal_of_any_rank
from fsdmoe.launch.ranks import shutdown
from fsdmoe.run.lock import LOCK
from fsdmoe.testing import run_ranks
from fsdmoe.train import train
from tests.support.tiny_run import tiny_config

GLOO = "[/src/third_party/gloo/gloo/transport/tcp/"
LOST = [
    RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:5017: Connection reset by peer. GLHF!"),
    RuntimeError(f"{GLOO}pair.cc:534] Connection closed by peer [127.0.0.1]:5017"),
    RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
    dist.DistBackendError(
        "NCCL error: ncclRemoteError: A call failed, possibly due to a remote process exiting"
    ),
    dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//nope"),
    dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed"),
]
BUGS = [
    RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (4), got (2))"),
    RuntimeError(f"[enforce fail at {GLOO}pair.cc:446] op.preamble.length <= op.nbytes. 128 vs 64"),
    RuntimeError("the download of tokens.bin timed out"),
    RuntimeError("Connection refused by the tokenizer server"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    dist.DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error)[-40:])
def test_a_lost_peer_is_said_in_a_line(error: RuntimeError) -> None:
    message = lost_peer_message(error, 7)
    assert message is not None
    assert "lost contact with another rank in step 7" in message


@pytest.mark.parametrize("error", BUGS, ids=lambda error: str(error)[-40:])
def test_other_errors_of_the_same_sound_keep_their_traceback(error: RuntimeError) -> None:
    assert lost_peer_message(error, 7) is None


def _failing_main(folder: Path, texts: list[str]) -> tuple[int, str]:
    """``train`` where building the run fails on each rank in its own words; exit code and stderr."""
    told, text = io.StringIO(), texts[dist.get_rank()]
    config = tiny_config(str(folder), dist.get_world_size())

    def build(config: Config, meshes: object, *, trains: bool, told: object, decisions: object) -> None:
        assert (folder / LOCK).exists()
        dist.barrier()
        raise ConfigError(text)

    command = mock.Mock(
        dry_run=False, evaluate_only=False, check_only=False, take_over=False, config=config, origins={}
    )
    with (
        mock.patch("fsdmoe.train.Run", build),
        mock.patch.object(failures, "_REPORT_SECONDS", 30.0 if len(set(texts)) == 1 else 0.2),
        contextlib.redirect_stderr(told),
    ):
        return train(command), told.getvalue()


def test_an_error_that_every_rank_meets_is_printed_once_and_leaves_no_lock(tmp_path: Path) -> None:
    results = run_ranks(_failing_main, 4, tmp_path, ["data.path: nothing there"] * 4)
    assert results == [(2, "fsdmoe: data.path: nothing there\n"), *[(2, "")] * 3]
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", failures.ERRORS}


def test_an_error_that_another_rank_meets_is_printed_by_that_rank(tmp_path: Path) -> None:
    results = run_ranks(_failing_main, 2, tmp_path, ["one thing", "data.path: not on this host"])
    assert results[1] == (2, "fsdmoe: rank 1: data.path: not on this host\n")


def _asked_to_stop() -> list[str]:
    """One rank by a signal; then its launcher is gone, which the signal that wakes it up follows."""
    is_asked = dist.get_rank() == 1
    nothing_can_be_read = torch.device("meta")
    signals: list[list[int]] = [[signal.SIGTERM], [lifecycle._LAUNCHER_GONE, signal.SIGTERM]]
    return [signal_of_any_rank(each if is_asked else [], nothing_can_be_read) for each in signals]


def test_ranks_learn_why_one_of_them_stops_without_waiting_for_their_devices() -> None:
    assert run_ranks(_asked_to_stop, 3) == [["SIGTERM", "the end of its launcher"]] * 3


def _fail_alone() -> str:
    """Rank 1 speaks while rank 0 knows of nothing."""
    told = io.StringIO()
    if dist.get_rank() == 1:
        with mock.patch.object(failures, "_REPORT_SECONDS", 0.2), contextlib.redirect_stderr(told):
            report_error(ConfigError("data.path: not on this host"))
    return told.getvalue()


def test_a_rank_that_fails_alone_does_not_wait_for_rank_0() -> None:
    assert run_ranks(_fail_alone, 2) == ["", "fsdmoe: rank 1: data.path: not on this host\n"]


def test_a_rank_that_was_started_by_hand_says_in_a_line_why_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    report_error("MASTER_ADDR: not known here\nfsdmoe: data.path: not here either")
    assert capsys.readouterr().err == "fsdmoe: rank 1: MASTER_ADDR: not known here\n"


def test_the_process_group_is_taken_down_at_an_ordinary_end_only() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert shutdown(2) == 2
        assert dist.is_initialized()
        assert shutdown(0) == 0
        assert not dist.is_initialized()
        assert shutdown(0) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_signal_while_a_lost_peer_is_told_does_not_cut_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    before, closed = signal.getsignal(signal.SIGTERM), []

    def close(status: str) -> None:
        signal.raise_signal(signal.SIGTERM)  # the launcher's, as soon as it sees that another rank has died
        closed.append(status)

    with Ending(tmp_path) as ending:
        ending.on_close = close
        ending.catch_signals()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1")
    assert closed == ["failed"]
    assert "lost contact with another rank" in (tmp_path / failures.ERRORS).read_text()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_launchers_echo_of_ctrl_c_is_not_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now)
    with Ending(tmp_path) as ending:
        received = ending.catch_signals()
        signal.raise_signal(signal.SIGINT)
        now += 0.9 * lifecycle._ECHO_SECONDS
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT, signal.SIGINT]
        now += 0.2 * lifecycle._ECHO_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("signals", "ends"),
    [
        ((signal.SIGINT, signal.SIGINT), True),
        ((signal.SIGINT, signal.SIGTERM), True),  # a second Ctrl-C, as torchrun passes it on
        ((signal.SIGTERM, signal.SIGINT), True),
        ((signal.SIGTERM, signal.SIGTERM), False),  # a scheduler may repeat itself
    ],
)
def test_a_second_ctrl_c_ends_at_once_however_the_launcher_passes_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[int, int], ends: bool
) -> None:
    now = 100.0
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now)
    closed: list[str] = []

    def close(status: str) -> None:
        signal.raise_signal(signal.SIGTERM)  # the launcher's, while the run closes
        closed.append(status)

    with Ending(tmp_path) as ending:
        ending.on_close = close
        ending.catch_signals()
        signal.raise_signal(signals[0])
        now += 2 * lifecycle._ECHO_SECONDS
        signal.raise_signal(signals[1])
        ending.status = "goes on"
    assert closed == ["interrupted" if ends else "goes on"]
    assert ending.code == (130 if ends else ending.code)


def test_a_rank_asks_to_be_started_again_when_only_other_nodes_were_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    world_size = 1
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    assert lifecycle.exit_code("stopped by SIGTERM", received=[]) == 75
    assert lifecycle.exit_code("stopped by SIGTERM", received=[15]) == 143, "no launcher answers for it"
    assert lifecycle.exit_code("finished", received=[15]) == 0
    world_size = 2
    assert lifecycle.exit_code("stopped by SIGTERM", received=[15]) == 0, "others may still be busy"
    world_size = 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")
    assert lifecycle.exit_code("stopped by SIGTERM", received=[15]) == 0
    assert lifecycle.exit_code("finished", received=[]) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert lifecycle.exit_code("stopped by SIGTERM", received=[]) == 0, "nobody would start it"


def test_a_disk_without_inodes_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not/yet"
    facts = SimpleNamespace(f_files=100, f_favail=0, f_bavail=5)
    monkeypatch.setattr(failures.os, "statvfs", lambda _: facts)
    assert free_some(folder).startswith(f"delete some files in {folder}, whose disk has space but no inodes")
    facts.f_favail = 7
    assert free_some(folder) == f"free some space in {folder}"


def before_a_signal(at: int) -> tuple[list[int], str]:
    """The items that two ranks get of ten, of which the second receives a signal at one."""
    received: list[int] = []
    seen: list[int] = []
    try:
        for number in range(10):
            lifecycle.leave_if_asked(received, torch.device("cpu"))
            seen.append(number)
            if number == at and dist.get_rank() == 1:
                received.append(signal.SIGTERM)
    except lifecycle.AskedToStop as asked:
        return seen, str(asked)
    return seen, ""


def test_all_ranks_leave_an_evaluation_at_the_same_batch() -> None:
    assert run_ranks(before_a_signal, 2, 3) == [([0, 1, 2, 3], "SIGTERM")] * 2
    assert run_ranks(before_a_signal, 2, 10) == [([*range(10)], "")] * 2
