"""The quick start, made small, learns as well with moments in eight bits as with those in float32."""

from pathlib import Path

import pytest

from fsdmoe.observe.metrics import read_metrics
from tests.support.scripts import Program

STEPS, LAST, SEEDS = 90, 30, (1, 2, 3, 4)
FORMATS = ("float32", "float8")


def curves(folder: Path, seed: int) -> list[float]:
    """The mean of the last losses, by format: two runs on the same rows, from the same weights."""
    running = []
    for kept in FORMATS:
        options = {
            "train.steps": STEPS, "train.global_batch_size": 16, "train.micro_batch_size": 16,
            "train.eval_interval": -1, "train.output_dir": folder / f"{kept}-{seed}", "train.seed": seed,
            "optim.moment_dtype": kept, "checkpoint.interval": -1, "observe.log_interval": 1,
            "model.hidden_size": 64, "model.num_hidden_layers": 1, "data.seq_len": 64,
        }  # fmt: skip
        arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        running.append(Program("train.py", "--config", "configs/quickstart.toml", *arguments))
    found = []
    for kept, run in zip(FORMATS, running, strict=True):
        assert run.wait(250) == 0, run.stderr
        rows = read_metrics(folder / f"{kept}-{seed}" / "metrics.jsonl")
        losses = [row["loss"] for row in rows if "loss" in row]
        assert len(losses) == STEPS
        assert losses[-1] < 0.6 * losses[0], "it does not learn"
        found.append(sum(losses[-LAST:]) / LAST)
    return found


@pytest.mark.full
def test_the_quick_start_ends_at_most_half_a_percent_above_float32(tmp_path: Path) -> None:
    # One pair of runs says little: they part after some steps, and end up to two percent apart either way.
    pairs = [curves(tmp_path, seed) for seed in SEEDS]
    excess = [small / plain - 1 for plain, small in pairs]
    print(f"means of the last {LAST} losses {pairs}; apart by {[f'{each:+.2%}' for each in excess]}")
    assert sum(excess) / len(excess) <= 0.005
