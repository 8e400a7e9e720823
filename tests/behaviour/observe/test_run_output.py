"""What a user of ``train.py`` reads: at the start, while it runs, and in the summary it leaves."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

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


def wait_for(condition: Callable[[], bool], program: Program) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert program.process.is_alive(), program.stdout + program.stderr
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.05)


def test_after_ctrl_c_the_summary_tells_of_the_last_step_done(tmp_path: Path) -> None:
    program = Program("train.py", *arguments(tmp_path))
    try:
        # Evaluations have rows of their own, so this is beyond the one step that is logged.
        wait_for(lambda: any("eval_loss" in row for row in rows(tmp_path)), program)
        os.kill(program.process.pid or 0, signal.SIGINT)
        assert program.wait(300) == 0, program.stderr
    finally:
        program.kill()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert step >= 3
    lines = summary_lines(tmp_path)
    assert lines["status"] == "stopped by SIGINT"
    assert lines["steps"] == f"{step} of 100000"
    assert lines["tokens"].split()[0] == str(step * TOKENS_PER_STEP)
    assert lines["final loss"].startswith(f"{rows(tmp_path)[-1]['loss']:.4f} at step {step}")


def test_a_finished_run_keeps_its_summary_when_it_is_run_again(tmp_path: Path) -> None:
    short = ("--train.steps", "2", "--train.eval_interval", "-1")
    first = run_program("train.py", *arguments(tmp_path, *short))
    assert first.process.exitcode == 0, first.stderr
    left = [tmp_path / "run" / name for name in ("summary.txt", "loss.svg")]
    before = [(path.read_text(), path.stat().st_mtime_ns) for path in left]
    again = run_program("train.py", *arguments(tmp_path, *short))
    assert again.process.exitcode == 0, again.stderr
    assert "nothing left to train" in again.stderr
    assert [(path.read_text(), path.stat().st_mtime_ns) for path in left] == before
    lines = summary_lines(tmp_path)
    assert lines["final loss"].endswith(f"mean of the last 1 rows {rows(tmp_path)[-1]['loss']:.4f}")
