"""What a user of ``train.py`` reads: at the start, while it runs, and in the summary it leaves."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdmoe.observe.metrics import read_metrics
from tests.support.scripts import Program, run_program

TINY = """
[model]
preset = "tiny-qwen3"
vocab_size = 264
[precision]
param_dtype = "float32"
[data]
kind = "python-stdlib"
max_bytes = 200_000
seq_len = 32
[observe]
tensorboard = false
log_interval = 1000
[checkpoint]
interval = 0
[train]
steps = 100_000
global_batch_size = 4
micro_batch_size = 4
eval_interval = 3
eval_batches = 1
"""
TOKENS_PER_STEP = 4 * 32
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def arguments(folder: Path, *changes: str) -> list[str]:
    path = folder / "run.toml"
    path.write_text(TINY)
    return ["--config", str(path), "--train.output_dir", str(folder / "run"), *changes]


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def summary_lines(folder: Path) -> dict[str, str]:
    """name -> value of the summary's two-column lines."""
    text = (folder / "run" / "summary.txt").read_text()
    matches = (re.match(r"  (\S+(?: \S+)*)\s{2,}(\S.*)", line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}


def card_lines(shown: str) -> dict[str, str]:
    """name -> text of the lines before the first step."""
    before = re.split(r"^step ", shown, flags=re.MULTILINE)[0].splitlines()
    pairs = (line.split(maxsplit=1) for line in before if line.strip())
    return {name: rest[0] if rest else "" for name, *rest in pairs}


def wait_for(condition: Callable[[], bool], program: Program) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert program.process.is_alive(), program.stdout + program.stderr
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """The folder of a run that Ctrl-C stopped between two rows, what it printed, and its last step."""
    folder = tmp_path_factory.mktemp("interrupted")
    program = Program("train.py", *arguments(folder, "--observe.progress", "on"))
    try:
        # Evaluations have rows of their own, so this is beyond the one step that is logged.
        wait_for(lambda: any("eval_loss" in row for row in rows(folder)), program)
        os.kill(program.process.pid or 0, signal.SIGINT)
        assert program.wait(300) == 130, program.stderr
    finally:
        program.kill()
    (saved,) = (folder / "run" / "checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert step >= 3
    return folder, program.stdout, step


def test_after_ctrl_c_the_summary_tells_of_the_last_step_done(interrupted: tuple[Path, str, int]) -> None:
    folder, _, step = interrupted
    lines = summary_lines(folder)
    assert lines["status"] == "stopped by SIGINT"
    assert lines["steps"] == f"{step} of 100000"
    assert lines["tokens"].split()[0] == str(step * TOKENS_PER_STEP)
    assert lines["final loss"].startswith(f"{rows(folder)[-1]['loss']:.4f} at step {step}")


def test_the_live_line_ends_with_the_newest_loss(interrupted: tuple[Path, str, int]) -> None:
    folder, shown, step = interrupted
    last = re.findall(r"step (\d+)/100000.*?loss (\d+\.\d+)", ESCAPES.sub("", shown))[-1]
    first = next(row for row in rows(folder) if "loss" in row)
    assert first["step"] == 1
    assert last[0] == str(step)
    assert last[1] != f"{first['loss']:.4f}", "the only loss that the interval had logged"
    assert last[1] == f"{rows(folder)[-1]['loss']:.4f}"


SHORT = ("--train.steps", "2", "--train.eval_interval", "-1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    program = run_program("train.py", *arguments(folder, *SHORT))
    assert program.process.exitcode == 0, program.stderr
    return folder


def test_the_mean_of_the_last_rows_leaves_step_1_out(finished: Path) -> None:
    assert [row["step"] for row in rows(finished)] == [1, 2]
    mean = f"mean of the last 1 rows {rows(finished)[1]['loss']:.4f}"
    assert summary_lines(finished)["final loss"].endswith(mean)


def test_a_finished_run_keeps_its_summary_when_it_is_run_again(finished: Path) -> None:
    left = [finished / "run" / name for name in ("summary.txt", "loss.svg")]
    before = [(path.read_text(), path.stat().st_mtime_ns) for path in left]
    again = run_program("train.py", *arguments(finished, *SHORT))
    assert again.process.exitcode == 0, again.stderr
    assert "nothing left to train" in again.stderr
    assert [(path.read_text(), path.stat().st_mtime_ns) for path in left] == before
    assert card_lines(again.stdout)["weights"] == (
        f"checkpoint of step 2 ({finished / 'run'}/checkpoints/step_00000002)"
    )


def test_the_start_shows_what_the_run_is_a_line_a_fact(tmp_path: Path) -> None:
    program = run_program(
        "train.py", *arguments(tmp_path, "--train.steps", "1", "--checkpoint.interval", "-1")
    )
    assert program.process.exitcode == 0, program.stderr
    card = card_lines(program.stdout)
    assert list(card) == [
        "model",
        "weights",
        "balance",
        "data",
        "loss",
        "evaluation",
        "precision",
        "devices",
        "batch",
        "memory",
        "activations",
        "decided",
        "output",
    ]
    layer = 2 * 32 * (32 + 16) + 2 * 8 + 2 * 32 + 8 * 32  # projections, norms, router
    shared, expert = 2 * 264 * 32 + 32 + 2 * layer, 3 * 32 * 16
    total, active = shared + 2 * 8 * expert, shared + 2 * 2 * expert
    assert card["model"] == (
        f"tiny-qwen3: {total / 1e3:.1f}k parameters, {active / 1e3:.1f}k active a token; "
        "2 layers, 2 with 8 experts, top 2"
    )
    assert card["weights"] == "random, seed 0"
    assert re.fullmatch(
        r"python-stdlib: [\d,]+ documents, 2\d\dk tokens; tokenizer bytes, 264 ids", card["data"]
    )
    assert card["loss"] == "on every token"
    assert "experts.dispatcher = local (every rank holds every expert (ep 1))" in card["decided"]
    assert card["precision"] == "float32, gradients summed in float32, main weights float32"
    assert card["devices"] == "1 x CPU"
    assert card["batch"] == "128 tokens a step (4 sequences of 32), steps 1 to 1"
    assert "GiB a rank before activations: main weights" in card["memory"]
    assert card["output"] == str(tmp_path / "run")
    assert summary_lines(tmp_path)["data"] == card["data"]


def test_rows_name_every_source_with_tokens_epochs_and_weight(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 4000)
    given = arguments(tmp_path, "--train.steps", "2", "--data.cache_dir", str(tmp_path / "cache"))
    sources = "".join(
        f'[[data.sources]]\npath = "{tmp_path}/{name}.txt"\nname = "{name}"\nweight = {weight}\n'
        for name, weight in (("a", 3.0), ("b", 1.0))
    )
    one_source = 'kind = "python-stdlib"\nmax_bytes = 200_000\n'
    (tmp_path / "run.toml").write_text(TINY.replace(one_source, "holdout = 0.0\n") + sources)
    done = run_program("train.py", *given, "--train.eval_interval", "-1", "--observe.log_interval", "1")
    assert done.wait() == 0, done.stderr
    *_, row = read_metrics(tmp_path / "run/metrics.jsonl")
    assert (row["sources"]["a"]["weight"], row["sources"]["b"]["weight"]) == (0.75, 0.25)
    assert row["sources"]["a"]["tokens"] + row["sources"]["b"]["tokens"] == row["tokens"]
    assert all(source["epochs"] > 0 for source in row["sources"].values())
