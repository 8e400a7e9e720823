"""The quick start, made small, learns as well with moments in eight bits as with those in float32."""

from pathlib import Path

import pytest

from fsdmoe.observe.metrics import read_metrics
from tests.support.scripts import run_program

STEPS = 200


def curve(folder: Path, kept: str) -> tuple[float, float]:
    """The mean loss of the last half of the steps, and the loss on held-out documents at the end."""
    options = {
        "train.steps": STEPS, "train.global_batch_size": 4, "train.micro_batch_size": 4,
        "train.eval_interval": STEPS, "train.eval_batches": 4, "train.output_dir": folder / kept,
        "optim.moment_dtype": kept, "checkpoint.interval": -1, "observe.log_interval": 1,
        "model.hidden_size": 64, "model.num_hidden_layers": 1, "data.seq_len": 64,
    }  # fmt: skip
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    done = run_program("train.py", "--config", "configs/quickstart.toml", *arguments, timeout=280)
    assert done.wait() == 0, done.stderr
    rows = read_metrics(folder / kept / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == STEPS
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return sum(losses[STEPS // 2 :]) / (STEPS - STEPS // 2), evaluated[-1]


@pytest.mark.full
def test_the_quick_start_ends_at_most_half_a_percent_above_float32(tmp_path: Path) -> None:
    (plain, plain_eval), (small, small_eval) = (curve(tmp_path, kept) for kept in ("float32", "float8"))
    print(f"mean of the last {STEPS // 2} losses {plain:.4f} and {small:.4f}; held out {plain_eval:.4f} and "
          f"{small_eval:.4f}")  # fmt: skip
    # Batches are small and the rate is high: held-out losses of two such runs are a percent apart.
    assert small < plain * 1.005
    assert small_eval < plain_eval * 1.01
    assert small == pytest.approx(plain, rel=2e-2)
