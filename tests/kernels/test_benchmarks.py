"""The benchmarks of the training step: what they conclude from figures, and a run in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.programs import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_the_best_peer_is_what_ratios_refer_to(capsys: pytest.CaptureFixture[str]) -> None:
    import train_step
    from train_step_contenders import Problem

    from fsdmoe.models import preset_config

    problem = Problem(preset_config("tiny-qwen3"), 4, 4096, "bfloat16", torch.device("cpu"), "eager")
    losses = [12.0, 11.9, 11.8]
    found = {
        "fsdmoe": [train_step.Outcome("fsdmoe", losses, ms=ms, peak_gib=60.0) for ms in (180.0, 220.0)],
        "torchtitan compiled": [train_step.Outcome("torchtitan compiled", losses, ms=260.0, peak_gib=80.0)],
        "transformers": [train_step.Outcome("transformers", [12.0, 11.9, 13.0], ms=400.0, peak_gib=70.0)],
        "transformers compiled": [train_step.Outcome("transformers compiled", error="out of memory")],
    }
    rows = train_step.summarise(found, problem)
    assert [row.contender for row in rows] == ["fsdmoe", "torchtitan compiled", "transformers"]
    assert rows[0].tokens_per_s == pytest.approx(4 * 4096 / 0.2)
    assert not train_step.report(rows, problem), "losses that differ must be seen"
    printed = capsys.readouterr().out
    assert "fsdmoe: 1.300 x the tokens/s of torchtitan compiled" in printed
    assert "at 0.750 of its peak memory" in printed
    assert "NO: transformers" in printed


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_kernels_are_judged_by_what_rounding_does_to_the_curve() -> None:
    import loss_curve

    plain, wide = [2.0, 1.0], [2.02, 1.01]
    near = {"fused": [2.01, 1.005], "plain": plain, "wide": wide}
    far = {"fused": [2.2, 1.1], "plain": plain, "wide": wide}
    assert loss_curve.report(near)
    assert not loss_curve.report(far)


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_the_time_of_a_call_is_that_of_one_of_its_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    import timing

    calls: list[float] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 7.0 + sum(calls))
    found = timing.milliseconds(lambda: calls.append(0.02), 4, torch.device("cpu"))
    assert len(calls) == 4
    assert found == pytest.approx(20)


def test_a_small_step_runs_and_kernels_forbidden_or_not_give_the_same_losses(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    arguments = ["--tiny", "--rounds", "1", "--contenders", "fsdmoe", "fsdmoe torch", "--json", str(out)]
    done = run_program("benchmarks/train_step.py", *arguments)
    assert done.wait() == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["fsdmoe", "fsdmoe torch"]
    assert all(row["tokens_per_s"] > 0 and row["loss_gap"] == 0 for row in rows)
