"""Runs that were ended are compared where both of a pair were evaluated."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import convergence


def write(folder: Path, losses: list[float], held_out: dict[int, float]) -> None:
    folder.mkdir()
    rows = [{"step": step + 1, "loss": loss} for step, loss in enumerate(losses)]
    rows += [{"step": step, "eval_loss": loss} for step, loss in held_out.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_held_out_losses_are_paired_at_the_last_step_that_all_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        write(tmp_path / f"bf16-{seed}", [4.0, 2.0, 2.0, 1.0], {2: 2.0, 4: 1.0})
    write(tmp_path / "mxfp8-0", [4.0, 2.0, 2.0, 1.0], {2: 2.02, 4: 1.5})
    write(tmp_path / "mxfp8-1", [4.0, 2.0, 3.0], {2: 2.06})
    monkeypatch.setattr(
        sys, "argv", ["convergence.py", "--report", "--seeds", "2", "--folder", str(tmp_path)]
    )
    convergence.main()
    told = capsys.readouterr().out
    assert "| bf16 | 1.0000, 1.0000 | 4 |" in told
    assert "| mxfp8 | 2.0200, 2.0600 | 2 | +1.00%, +3.00% | +2.00% | 3 | +0.00%, +12.50% | +6.25% |" in told


def test_runs_without_their_base_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--report", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="expected runs of bf16"):
        convergence.main()
