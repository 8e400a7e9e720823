"""The rung at size: what its figures are made of, and a run in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_seconds_leave_out_what_is_before_the_first_step_of_each_start(tmp_path: Path) -> None:
    import rung

    times = [("start", 0), ("ready", 10), ("save", 40), ("restart", 70), ("ready", 80), ("end", 100)]
    lines = [json.dumps({"time": time, "event": event}) for event, time in times]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert rung.seconds_of(tmp_path) == 30 + 20


def test_runs_are_as_far_apart_as_their_smoothed_losses_in_the_second_half(tmp_path: Path) -> None:
    import rung

    for name, gap in (("one", 0.0), ("other", 0.5)):
        rows = [
            # What goes up and down is smoothed out.
            {"step": step, "loss": 5 - step / 100 + (0 if step <= 50 else gap + gap * (-1) ** step)}
            for step in range(1, 101)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rung.distance(tmp_path / "one", tmp_path / "other") == pytest.approx(0.5)


@pytest.mark.full
def test_a_small_rung_is_killed_goes_on_and_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "rung"
    done = run_program("benchmarks/rung.py", "--tiny", "--folder", str(folder))
    assert done.wait() == 0, done.stderr
    assert "halves: killed behind step" in done.stdout
    events = [json.loads(line)["event"] for line in (folder / "halves/events.jsonl").read_text().splitlines()]
    assert events.count("restart") == 1
    told = run_program("benchmarks/rung.py", "--tiny", "--report", str(folder), "--pictures", str(tmp_path))
    assert told.wait() == 0, told.stderr
    assert told.stdout.count("| 24 |") == 3
    assert len(list(tmp_path.glob("rung_*.svg"))) == 4
