"""The benchmarks run from end to end on a CPU, so that a GPU's time is not spent on finding that they do
not."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_program

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str) -> str:
    done = run_program(f"benchmarks/{script}", *options, timeout=900)
    assert done.wait() == 0, done.stderr
    return done.stdout


def test_the_padding_table_is_printed() -> None:
    printed = run("fsdp_padding.py")
    rows = [line.split() for line in printed.splitlines() if " dense unit " in line]
    assert len(rows) == 6
    assert all(float(cell) < 0.5 for row in rows[::2] for cell in row[-4:])


@pytest.mark.full
def test_the_step_benchmark_prints_everything(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    printed = run(
        "fsdp_step.py", "--tiny", "--rounds", "1", "--steps", "1", "--recompute", "--json", str(out)
    )
    for heading in (
        "== memory, ep 1",
        "own work in a step, ep 8",
        "== step, ep 8",
        "== host time",
        "== real ranks",
    ):
        assert heading in printed
    results = json.loads(out.read_text())
    for found in results.values():
        assert found["work"]["fsdmoe"]["total"] < found["work"]["FSDP2"]["total"] / 2
        assert found["work"]["fsdmoe"]["allocations"] == 0


@pytest.mark.full
def test_the_optimizer_benchmark_has_a_row_for_every_way_to_keep_moments() -> None:
    rows = [line.split()[:2] for line in run("optimizer_state.py", "--tiny").splitlines()[2:]]
    assert rows[:2] == [["float32", "0.00"], ["bfloat16", "0.00"]]
    assert rows[4] == ["bfloat16", "0.35"]
    assert len(rows) == 11
