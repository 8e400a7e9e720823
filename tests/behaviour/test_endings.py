"""How runs end: asked to stop, struck by a non-finite gradient, or left by a rank that died."""

import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

import train
from fsdmoe.config import to_toml
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import GradNorm, clip_grad_norm
from fsdmoe.precision.loss_scale import LossScaler
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.scripts import Program, started_ranks
from tests.support.tiny_run import tiny_config

ROOT = Path(__file__).parent.parent.parent


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def running(folder: Path) -> Iterator[list[Program]]:
    """Two ranks of a run that would go on for long, once it has made a few steps."""
    config = folder / "run.toml"
    config.write_text(to_toml(tiny_config(str(folder / "run"), 2, train__steps=100_000)))
    with started_ranks(2, "train.py", "--config", str(config)) as ranks:
        deadline = time.monotonic() + 300
        while len(rows(folder / "run")) < 3:
            assert ranks[0].process.is_alive(), ranks[0].stdout + ranks[0].stderr
            assert time.monotonic() < deadline, "the run did not start stepping"
            time.sleep(0.1)
        yield ranks


def test_sigterm_finishes_the_step_and_leaves_a_summary(tmp_path: Path) -> None:
    with running(tmp_path) as ranks:
        for rank in ranks:
            os.kill(rank.process.pid, signal.SIGTERM)
        for rank in ranks:
            assert rank.wait(300) == 0, rank.stdout + rank.stderr
            assert "Traceback" not in rank.stdout + rank.stderr
    assert "stopped by SIGTERM" in (tmp_path / "run/summary.txt").read_text()
    assert rows(tmp_path / "run")[-1]["step"] < 100_000


def test_a_dead_rank_stops_the_others_with_a_message(tmp_path: Path) -> None:
    with running(tmp_path) as (first, second):
        second.kill()
        assert first.wait(300) not in (0, None)
        assert "lost contact with another rank" in first.stderr


def _left_evaluation(folder: str) -> tuple[str, list[float], str, list[float]]:
    """How a run ends that is told to stop in its last evaluation, and how the next start ends; with the
    steps that were evaluated by then."""
    config = tiny_config(
        folder, 1, train__steps=4, train__eval_interval=4, train__eval_batches=1, checkpoint__interval=4,
        checkpoint__load="latest", checkpoint__max_failed_saves=1,
    )  # fmt: skip

    def evaluated() -> list[float]:
        return [row["step"] for row in rows(Path(folder)) if "eval_loss" in row]

    received: list[int] = []
    run = Run(config, build_meshes(config.mesh))

    def told_meanwhile(*_: object, before_each: Callable[[], object]) -> float:
        received.append(signal.SIGTERM)
        before_each()
        raise AssertionError("it goes on")

    with mock.patch.object(run.feed, "held_out_loss", told_meanwhile):
        status = run.loop(received)
    run.close(status)
    run.checkpoints.close()
    found = status, evaluated()
    again = Run(config, build_meshes(config.mesh))
    status = again.loop([])
    again.close(status)
    again.checkpoints.close()
    return (*found, status, evaluated())


def test_an_evaluation_that_a_signal_ended_is_made_by_the_next_start(tmp_path: Path) -> None:
    found = run_ranks(_left_evaluation, 1, str(tmp_path / "run"))[0]
    assert found == ("stopped by SIGTERM", [], "finished", [4])


class Killed(BaseException):
    """In the place of a SIGKILL: nothing is closed."""


def _killed_in_evaluation(folder: str) -> tuple[list[float], list[float]]:
    """The steps that a run has evaluated that is killed in its first evaluation, and its next start."""
    config = tiny_config(
        folder, 1, train__steps=4, train__eval_interval=2, train__eval_batches=1, checkpoint__interval=2,
        checkpoint__load="latest", checkpoint__asynchronous=False, observe__log_interval=3,
    )  # fmt: skip

    def evaluated() -> list[float]:
        return [row["step"] for row in rows(Path(folder)) if "eval_loss" in row]

    run = Run(config, build_meshes(config.mesh))
    with mock.patch.object(run.feed, "held_out_loss", side_effect=Killed), pytest.raises(Killed):
        run.loop([])
    before = evaluated()
    run.data.close()
    again = Run(config, build_meshes(config.mesh))
    again.close(again.loop([]))
    again.checkpoints.close()
    return before, evaluated()


def test_an_evaluation_in_which_a_run_was_killed_is_made_by_the_next_start(tmp_path: Path) -> None:
    """Its step has no row of its own yet, where steps are not logged one by one."""
    assert run_ranks(_killed_in_evaluation, 1, str(tmp_path / "run"))[0] == ([], [2, 4])


def _poisoned(output_dir: str, steps: set[int]) -> tuple[list[float], int]:
    """The sum of some weights before each optimizer step, with the gradient norm made NaN in some steps."""
    config = tiny_config(output_dir, 1, train__steps=6, train__max_skipped_steps=2)
    run = Run(config, build_meshes(config.mesh))
    weight = dict(run.model.named_parameters())["model.embed_tokens.weight"]
    seen: list[float] = []

    def poisoned(model: nn.Module, max_norm: float, scaler: LossScaler) -> GradNorm:
        seen.append(weight.full_tensor().sum().item())  # type: ignore[attr-defined]
        norm = clip_grad_norm(model, max_norm, scaler)
        return replace(norm, total=norm.total * float("nan")) if len(seen) in steps else norm

    with mock.patch("fsdmoe.train.clip_grad_norm", poisoned):
        try:
            run.close(run.loop([]))
        finally:
            run.data.close()
    return seen, run.progress["skipped"]


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(tmp_path: Path) -> None:
    (weights, skipped), *_ = run_ranks(_poisoned, 1, str(tmp_path), {2, 3})
    assert skipped == 2
    assert weights[1] == weights[2] == weights[3], "steps 2 and 3 changed nothing"
    assert weights[0] != weights[1]
    assert weights[3] != weights[4]
    assert [row["skipped"] for row in rows(tmp_path) if "loss" in row][-1] == 2


def _main(*arguments: str) -> tuple[int, str]:
    """The exit code of ``train.py`` and what it told the user."""
    told = io.StringIO()
    with mock.patch("sys.argv", ["train.py", *arguments]), contextlib.redirect_stderr(told):
        return train.main(), told.getvalue()


def test_a_run_that_was_finished_says_so_and_a_checkpoint_that_does_not_fit_is_refused_in_a_line(
    tmp_path: Path,
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        to_toml(
            tiny_config(str(tmp_path), 1, train__steps=1, checkpoint__interval=0, checkpoint__load="latest")
        )
    )
    arguments = ("--config", str(config))
    assert run_ranks(_main, 1, *arguments, fresh=True)[0][0] == 0
    ((code, told),) = run_ranks(_main, 1, *arguments, fresh=True)
    assert code == 0
    assert "nothing left to train" in told
    larger = (*arguments, "--model.hidden_size", "64")
    ((code, told),) = run_ranks(_main, 1, *larger, fresh=True)
    assert code == 2
    assert "fsdmoe: model.hidden_size 32 -> 64: expected the model of the checkpoints" in told
    apart = ("--train.output_dir", str(tmp_path / "larger"), "--checkpoint.load", str(tmp_path))
    ((code, told),) = run_ranks(_main, 1, *larger, *apart, fresh=True)
    assert code == 1
    assert "step_00000001 does not fit" in told
    assert "fsdmoe: checkpoint.load = " in told
    assert "set it to none to start anew" in told
    (tmp_path / "nothing").mkdir()
    elsewhere = (
        "--train.output_dir",
        str(tmp_path / "other"),
        "--checkpoint.load",
        str(tmp_path / "nothing"),
    )
    ((code, told),) = run_ranks(_main, 1, *arguments, *elsewhere, fresh=True)
    assert code == 1
    assert f"fsdmoe: checkpoint.load = {tmp_path / 'nothing'}: " in told
    assert "no checkpoint here" in told


def _poisoned_too_often(output_dir: str) -> str:
    try:
        _poisoned(output_dir, {1, 2, 3, 4})
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    assert run_ranks(_poisoned_too_often, 1, str(tmp_path))[0].startswith(
        "train.max_skipped_steps: 3 steps in a row"
    )


def _one_step(output_dir: str) -> None:
    config = tiny_config(output_dir, 1, train__steps=1, model__preset="tiny-deepseek-v3")
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))


def test_expert_loads_are_recorded_under_the_models_layer_numbers(tmp_path: Path) -> None:
    run_ranks(_one_step, 1, str(tmp_path))
    (loads,) = [row["experts"] for row in rows(tmp_path) if "experts" in row]
    assert "layer 1" in loads
    assert "layer 0" not in loads, "the first layer is dense"
