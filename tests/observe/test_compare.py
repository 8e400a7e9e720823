"""Runs compared: figures, differences, the page, and the command."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdmoe.core import events
from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.__main__ import main, read_runs
from fsdmoe.observe.compare import differences, held_out_note, notes, page, table

KEPT = """# The configuration of this run
#   train.steps    command line
#   mesh.dp_shard  default; decided by "auto": {ranks}

[train]
steps = 20
output_dir = "runs/{name}"
[optim]
lr = {lr}
betas = [0.9, 0.95]
[mesh]
dp_shard = -1
"""


def make_run(folder: Path, *, lr: float = 1e-3, ranks: int = 2, steps: int = 20) -> Path:
    """The folder of a run whose loss falls from 5 to 3, at 200 tokens/s."""
    folder.mkdir()
    rows = [
        {
            "step": step, "tokens": 100 * step, "loss": 5 - 0.1 * step, "lr": lr, "grad_norm": 0.5,
            "tokens_per_s": 200.0, "tflops": 2.0, "mfu": None, "memory_gib": 1.5, "seconds": 30.0,
            "skipped": 0,
            "experts": {"layer 0": {"max_over_mean": 2.0, "cv": 0.8, "dead_fraction": 0.25, "entropy": None}},
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    rows.append({"step": steps, "eval_loss": 3.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(KEPT.format(ranks=ranks, name=folder.name, lr=lr))
    return folder


def test_figures_of_runs_stand_in_columns(tmp_path):
    runs = read_runs([str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", steps=10))])
    assert [run.name for run in runs] == ["a", "b"]
    rows = {name: cells for name, *cells in table(runs)}
    assert rows["steps"] == ["20", "10"]
    assert rows["tokens"] == ["2k", "1k"]
    assert rows["loss, mean of the last rows"] == ["3.4500 (10 rows)", "4.4000 (9 rows)"]
    assert rows["loss, mean of the last rows up to step 10"] == ["4.4000 (9 rows)"] * 2
    assert rows["loss, mean of the last rows up to 1k tokens"] == ["4.4000 (9 rows)"] * 2
    assert rows["evaluation loss, best"] == ["3.2500 at step 20", "3.2500 at step 10"]
    assert rows["tokens/s, median"] == ["200", "200"]
    assert rows["time in training steps"] == ["10:00", "5:00"]
    assert rows["peak memory"] == ["1.50 GiB"] * 2
    assert rows["busiest expert over mean, worst layer"] == ["2.00"] * 2
    assert rows["experts without tokens"] == ["25.0%"] * 2


def test_curves_are_over_steps_tokens_and_minutes_and_evaluations_stand_on_them(tmp_path):
    (run,) = read_runs([str(make_run(tmp_path / "a"))])
    last = {over: run.points(over, "loss")[-1].tolist() for over in ("steps", "tokens", "minutes")}
    assert last == {"steps": [20, 3.0], "tokens": [2000, 3.0], "minutes": [10, 3.0]}
    assert run.evals("minutes").tolist() == [[10, 3.25]]


def test_differences_are_keys_and_decisions_but_not_the_folder(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=2e-3, ranks=8)]
    assert differences(read_runs(list(map(str, folders)))) == [
        ["optim.lr", "0.001", "0.002"],
        ["mesh.dp_shard", "-1: 2", "-1: 8"],
    ]


def test_evaluation_losses_over_different_rows_are_noted(tmp_path, capsys):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=2e-3)]
    for folder, holdout in zip(folders, (0.01, 0.1), strict=True):
        kept = folder / "config.toml"
        kept.write_text(f"{kept.read_text()}[data]\nholdout = {holdout}\nprefetch = {holdout}\n")
    assert main(["compare", *map(str, folders), "--html", str(tmp_path / "page.html")]) == 0
    note = "Evaluation losses are not over the same rows (different data.holdout):"
    assert note in " ".join(capsys.readouterr().out.split())
    assert note in (tmp_path / "page.html").read_text()
    assert held_out_note(read_runs([str(folders[0])] * 2)) is None


def test_a_run_without_a_kept_configuration_and_one_that_has_just_begun_are_shown(tmp_path, capsys):
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new")
    (old / "config.toml").unlink()
    (new / "metrics.jsonl").write_text("")
    assert main(["compare", str(old), str(new), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "old has no config.toml" in shown
    assert "no key differs" in shown


def test_the_command_prints_tables_and_writes_a_page_that_needs_no_other_file(tmp_path, capsys):
    folders = [make_run(tmp_path / "a<b>"), make_run(tmp_path / "b", lr=2e-3)]
    target = tmp_path / "page.html"
    assert main(["compare", *map(str, folders), "--html", str(target)]) == 0
    shown = capsys.readouterr().out
    for piece in ("evaluation loss, best", "optim.lr", "0.002", f"page in {target}"):
        assert piece in shown
    html = target.read_text()
    assert "a&lt;b&gt;" in html
    assert "a<b>" not in html
    for heading in ("Loss over minutes", "Throughput", "Peak memory", "Expert load"):
        assert f"<figcaption>{heading}</figcaption>" in html
    links = re.findall(r'(?:src|href)="([^"#][^"]*)"|url\(([^#)][^)]*)\)', html)
    assert [each for pair in links for each in pair if each and not each.startswith("data:")] == []
    assert "<script" not in html


def test_heat_maps_are_of_the_least_even_layers(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "tensorboard").mkdir()
    layers = [f"layer {n}" for n in range(12)]
    even = {"max_over_mean": 1.0, "cv": 0.0, "dead_fraction": 0.0, "entropy": 1.0}
    row = {"step": 20, "loss": 3.0, "tokens": 2000, "experts": dict.fromkeys(layers, even)}
    row["experts"]["layer 11"] = even | {"max_over_mean": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    np.savez(
        folder / "tensorboard" / "expert_load.npz", names=np.array(layers), sizes=np.array([2] * 12),
        columns=np.ones((1, 24), dtype=np.float32), last_steps=np.array([20]), counters=np.array([1, 1, 1]),
    )  # fmt: skip
    html = page(read_runs([str(folder)]))
    assert [n for n in range(12) if f">layer {n}<" in html] == [0, 1, 2, 3, 4, 5, 6, 11]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        make_run(tmp_path / parent / "run")
    paths = [str(tmp_path / parent / "run") for parent in ("one", "two")]
    assert [run.name for run in read_runs(paths)] == paths


def test_what_cannot_be_read_or_written_is_named(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    assert main(["compare", str(folder), "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "none/page.html" in capsys.readouterr().err
    (folder / "config.toml").write_text("steps = ")
    assert main(["compare", str(folder)]) == 2
    assert "a/config.toml: expected TOML" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"no metrics.jsonl in it; name folders"):
        read_runs([str(tmp_path)])
    assert main(["compare", str(tmp_path)]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fsdmoe.observe.charts", raising=False)
    monkeypatch.delattr("fsdmoe.observe.charts", raising=False)
    assert main(["compare", str(make_run(tmp_path / "a")), "--html", str(tmp_path / "page.html")]) == 2
    shown = capsys.readouterr()
    assert "tokens/s, median" in shown.out, "the table needs no charts"
    assert "pip install 'fsdmoe[charts]'" in shown.err


def test_runs_without_evaluations_have_no_note_on_their_rows(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    for folder, holdout in zip(folders, (0.01, 0.1), strict=True):
        kept = folder / "config.toml"
        kept.write_text(f"{kept.read_text()}[data]\nholdout = {holdout}\n")
    assert notes(read_runs(list(map(str, folders))))
    metrics = folders[0] / "metrics.jsonl"
    metrics.write_text("".join(row for row in metrics.open() if "eval_loss" not in row))
    assert notes(read_runs(list(map(str, folders)))) == []


def test_what_a_resumed_run_changed_is_noted(tmp_path):
    folder = make_run(tmp_path / "a")
    events.append(folder, "start", step=0)
    events.append(folder, "restart", step=10, changed=["optim.lr 0.002 -> 0.001"])
    assert notes(read_runs([str(folder)])) == [
        "The configuration of a changed from step 11 on: optim.lr 0.002 -> 0.001."
    ]


def test_losses_of_different_kinds_are_noted(tmp_path):
    tables = [
        '[data]\nkind = "text"\n',
        '[[data.sources]]\nkind = "preference"\n[preference]\nloss = "ipo"\n',
    ]
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    for folder, table_of in zip(folders, tables, strict=True):
        kept = folder / "config.toml"
        kept.write_text(kept.read_text() + table_of)
    runs = read_runs(list(map(str, folders)))
    note = "Losses are not of the same kind (cross-entropy in a, DPO (ipo) in b): they do not compare."
    assert notes(runs)[0] == note
    assert note in page(runs)
    assert notes(runs[:1]) == []


@pytest.mark.parametrize("command", ["compare", "timeline"])
def test_a_file_of_a_run_in_place_of_its_folder_is_named(command, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert main([command, f"{tmp_path}/metrics.jsonl"]) == 2
    assert "metrics.jsonl: expected " in capsys.readouterr().err
