"""The whole package through its one entry point: records in, files and lines out."""

import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fsdmoe.observe import ObserveConfig, Observer, RunFacts, StepRecord
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.observe.observer import Pace
from fsdmoe.testing import run_ranks
from tests.observe.test_progress import HandTurned

FLOPS = 1.5e6
TOKENS = 1000
LOADS = {"layers.0": torch.tensor([4.0, 0.0, 2.0, 2.0]), "layers.1": torch.full((4,), 2.0)}
PLAIN = ObserveConfig(log_interval=5, tensorboard=False, progress="off")


def make_observer(folder: Path, config: ObserveConfig = PLAIN, **changes) -> Observer:
    is_main, clock = changes.pop("is_main", True), changes.pop("clock", None)
    settings = {
        "flops_per_token": FLOPS, "total_steps": 23, "tokens_per_step": TOKENS, "num_ranks": 2,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return Observer(config, RunFacts(**(settings | changes)), output_dir=folder, is_main=is_main, clock=clock)


def make_record(step: int, **changes) -> StepRecord:
    settings = {
        "step": step, "tokens": TOKENS * step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 0.5,
        "seconds": 0.25, "loads": LOADS,
    }  # fmt: skip
    return StepRecord(**(settings | changes))


def step_rows(folder: Path) -> list[dict]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" not in row]


def test_a_row_holds_every_promised_figure(tmp_path):
    observer = make_observer(tmp_path, ObserveConfig(tensorboard=False, log_interval=1, peak_tflops=0.5))
    observer.log_step(make_record(1))
    observer.log_eval(1, 4.5)
    observer.close("finished")
    row, evaluation = read_metrics(tmp_path / "metrics.jsonl")
    tflops = FLOPS * TOKENS / 0.25 / 2 / 1e12
    memory_gib = row.pop("memory_gib")
    assert 0.01 < memory_gib < 1000
    assert row == {
        "step": 1, "tokens": 1000, "loss": 5.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 4000.0,
        "tflops": pytest.approx(tflops), "mfu": pytest.approx(tflops / 0.5), "seconds": 0.25, "skipped": 0,
        "experts": {
            "layers.0": {"max_over_mean": 2.0, "cv": pytest.approx(math.sqrt(0.5)), "dead_fraction": 0.25,
                         "entropy": pytest.approx(0.75)},
            "layers.1": {"max_over_mean": 1.0, "cv": 0.0, "dead_fraction": 0.0,
                         "entropy": pytest.approx(1.0)},
        },
    }  # fmt: skip
    assert evaluation == {"step": 1, "eval_loss": 4.5}


def test_logged_are_the_first_the_last_and_every_fifth_step(tmp_path):
    observer = make_observer(tmp_path)
    for step in range(1, 24):
        observer.log_step(make_record(step))
    observer.close("finished")
    assert [row["step"] for row in step_rows(tmp_path)] == [1, 5, 10, 15, 20, 23]
    assert [step for step in range(1, 24) if observer.wants(step)] == [1, 5, 10, 15, 20, 23]


def test_speed_covers_all_steps_since_the_row_before_however_records_come(tmp_path):
    every, wanted = make_observer(tmp_path / "every"), make_observer(tmp_path / "wanted")
    waited = 0.0
    for step in range(1, 24):
        seconds = 0.1 * step
        waited += seconds
        every.log_step(make_record(step, seconds=seconds))
        if wanted.wants(step):
            wanted.log_step(make_record(step, seconds=waited))
            waited = 0.0
    every.close("finished")
    wanted.close("finished")
    for row, other in zip(step_rows(tmp_path / "every"), step_rows(tmp_path / "wanted"), strict=True):
        assert row["tokens_per_s"] == pytest.approx(other["tokens_per_s"])
        assert row["seconds"] == pytest.approx(other["seconds"])
    assert step_rows(tmp_path / "every")[1]["tokens_per_s"] == pytest.approx(
        4 * TOKENS / (0.1 * (2 + 3 + 4 + 5))
    )


def test_a_step_that_is_not_logged_never_touches_its_loads(tmp_path):
    observer = make_observer(tmp_path)
    untouchable = {"layers.0": torch.empty(4, device="meta")}  # reading it raises
    observer.log_step(make_record(1))
    for step in (2, 3, 4):
        observer.log_step(make_record(step, loads=untouchable))
    with pytest.raises((NotImplementedError, RuntimeError)):
        observer.log_step(make_record(5, loads=untouchable))


def test_a_skipped_step_is_logged_as_null_whenever_it_comes(tmp_path):
    observer = make_observer(tmp_path)
    for step in range(1, 9):
        skipped = int(step >= 7)
        observer.log_step(make_record(step, loss=math.nan if step == 7 else 1.0, skipped=skipped))
    observer.close("stopped")
    rows = step_rows(tmp_path)
    assert [(row["step"], row["loss"], row["skipped"]) for row in rows] == [
        (1, 1.0, 0),
        (5, 1.0, 0),
        (7, None, 1),
        (8, 1.0, 1),
    ]
    assert "skipped steps   1" in (tmp_path / "summary.txt").read_text()


def test_a_resumed_run_reads_like_one_that_never_stopped(tmp_path, capsys):
    whole = make_observer(tmp_path / "whole")
    for step in range(1, 24):
        whole.log_step(make_record(step))
    whole.close("finished")
    killed = make_observer(tmp_path / "resumed")
    for step in range(1, 18):
        killed.log_step(make_record(step, loss=5.0 / step if step <= 10 else 99.0))
    killed.log_eval(17, 99.0)  # and no close: the process dies here
    resumed = make_observer(tmp_path / "resumed", start_step=10)
    for step in range(11, 24):
        resumed.log_step(make_record(step))
    resumed.close("finished")
    # The first step of a start is logged besides.
    rows = [row for row in step_rows(tmp_path / "resumed") if row["step"] != 11]
    assert [row["step"] for row in rows] == [1, 5, 10, 15, 20, 23]
    assert [row["loss"] for row in rows] == [row["loss"] for row in step_rows(tmp_path / "whole")]
    assert [row["tokens_per_s"] for row in rows] == [4000.0] * 6
    assert read_metrics(tmp_path / "resumed" / "metrics.jsonl")[-1]["step"] == 23
    assert "metrics.jsonl: dropped 2 rows" in capsys.readouterr().out
    summary = (tmp_path / "resumed" / "summary.txt").read_text()
    assert "23 of 23 (resumed at 10)" in summary
    assert "99" not in summary.split("Training")[1].split("Speed")[0]


def test_a_stop_between_two_rows_logs_the_last_step_without_its_loads(tmp_path):
    observer = make_observer(tmp_path)
    untouchable = {"layers.0": torch.empty(4, device="meta")}  # reading it raises
    for step in range(1, 9):
        observer.log_step(make_record(step, loads=LOADS if observer.wants(step) else untouchable))
    observer.close("stopped by SIGINT")
    last = step_rows(tmp_path)[-1]
    assert (last["step"], last["tokens"], last["loss"]) == (8, 8 * TOKENS, 5.0 / 8)
    assert last["seconds"] == pytest.approx(3 * 0.25)
    summary = (tmp_path / "summary.txt").read_text()
    assert "8 of 23" in summary
    assert "Expert balance at step 5" in summary


def test_a_start_without_a_step_leaves_the_summary_of_the_one_before(tmp_path):
    finished = make_observer(tmp_path, total_steps=3)
    for step in (1, 2, 3):
        finished.log_step(make_record(step))
    finished.close("finished")
    before = (tmp_path / "summary.txt").read_text()
    make_observer(tmp_path, total_steps=3, start_step=3).close("finished")
    assert (tmp_path / "summary.txt").read_text() == before
    longer = make_observer(tmp_path, total_steps=4, start_step=3)
    longer.log_step(make_record(4))
    longer.close("finished")
    assert "4 of 4 (resumed at 3)" in (tmp_path / "summary.txt").read_text()


def test_the_end_leaves_summary_curve_and_events(tmp_path, capsys):
    config = ObserveConfig(log_interval=5, progress="off", heatmap_interval=10)
    observer = make_observer(tmp_path, config)
    observer.describe({"preset": "tiny"})
    observer.describe({"mesh": "ep 2"})
    for step in range(1, 24):
        observer.log_step(make_record(step))
    observer.log_eval(23, 0.75)
    observer.close("finished")
    observer.close("twice")  # a second call does nothing
    summary = (tmp_path / "summary.txt").read_text()
    for piece in ("finished", "tiny", "ep 2", "0.7500 at step 23", "layers.0", "4k (median"):
        assert piece in summary
    assert "twice" not in summary
    root = ElementTree.fromstring((tmp_path / "loss.svg").read_text())
    ids = {group.get("id") for group in root.iter("{http://www.w3.org/2000/svg}g")}
    assert {"train-loss", "eval-loss"} <= ids
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 5, 10, 15, 20, 23]
    assert [image.step for image in events.Images("expert_load")] == [10, 20, 23]
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step") and "loss" in line for line in shown) == 7
    assert "summary.txt" in shown[-1]


def test_a_run_without_matplotlib_ends_well_and_names_the_extra(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fsdmoe.observe.charts", raising=False)
    monkeypatch.delattr("fsdmoe.observe.charts", raising=False)
    observer = make_observer(tmp_path, ObserveConfig(log_interval=5, progress="off"))
    observer.log_step(make_record(1))
    observer.close("finished")
    assert (tmp_path / "summary.txt").exists()
    assert (tmp_path / "tensorboard" / "expert_load.npz").exists()
    assert not (tmp_path / "loss.svg").exists()
    told = [record.getMessage() for record in caplog.records if "not drawn" in record.getMessage()]
    assert len(told) == 2
    assert all("pip install 'fsdmoe[charts]'" in line for line in told)


def test_a_first_step_that_lasts_is_told_about_before_its_row(tmp_path, capsys):
    clock = HandTurned()
    observer = make_observer(tmp_path, clock=clock, start_step=10)
    for step in (11, 12):
        with observer.step_profile(step):
            clock.turn(90.0)
            observer.log_step(make_record(step))
    observer.close("stopped")
    shown = capsys.readouterr().out.splitlines()
    text = "step 11, the first of this start: compiling and warming up"
    assert shown[:2] == [f"{text} ...", f"{text}: 90.0 s"]
    assert shown[2].startswith("step 11/23 | loss")
    assert not any("step 12, " in line for line in shown)


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    observer = make_observer(tmp_path / "run", ObserveConfig(), is_main=False)
    observer.describe({"a": 1})
    observer.note("hello")
    with observer.step_profile(1):
        observer.log_step(make_record(1))
    observer.log_eval(1, 2.0)
    observer.close("finished")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def _observe_two_steps(folder: Path) -> None:
    config = ObserveConfig(
        tensorboard=False, progress="off", profile=True, profile_start=2, profile_steps=1, profile_ranks=()
    )
    observer = make_observer(folder, config, total_steps=2, is_main=dist.get_rank() == 0)
    for step in (1, 2):
        with observer.step_profile(step):
            dist.all_reduce(torch.ones(4))
        observer.log_step(make_record(step))
    observer.close("finished")


def test_two_ranks_leave_one_set_of_files_and_a_trace_each(tmp_path):
    run_ranks(_observe_two_steps, 2, tmp_path)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "loss.svg", "metrics.jsonl", "profile/trace_rank0_steps2-2.json.gz",
        "profile/trace_rank1_steps2-2.json.gz", "summary.txt",
    ]  # fmt: skip
    assert len(step_rows(tmp_path)) == 2


def _taken_apart(folder):
    rank = dist.get_rank()
    config = ObserveConfig(tensorboard=False, progress="off", exposed=True, profile_start=2, profile_steps=1,
                           profile_ranks=(0, 1))  # fmt: skip
    observer = make_observer(Path(folder), config, is_main=rank == 0)
    for step in range(1, 4):
        with observer.step_profile(step):
            torch.ones(96, 96) @ torch.ones(96, 96)
            dist.all_reduce(torch.ones(64))
        observer.log_step(make_record(step))
    observer.close("finished")


def test_profiled_ranks_are_taken_apart_and_the_slowest_is_named(tmp_path):
    run_ranks(_taken_apart, 2, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        f"{kind}_rank{rank}_steps2-2.{suffix}"
        for kind, suffixes in (("exposed", ("svg", "txt")), ("trace", ("json.gz",)))
        for rank in (0, 1)
        for suffix in suffixes
    ]
    table = (tmp_path / "profile/exposed_rank0_steps2-2.txt").read_text()
    assert "\nreduce " in table
    summary = (tmp_path / "summary.txt").read_text()
    assert re.search(r"slowest rank +[01], computes [\d.]+ ms a step, the mean of 2 ranks", summary)
    assert " ms a step (rank 0): reduce " in summary


def test_a_profile_that_never_came_is_mentioned(tmp_path, capsys):
    observer = make_observer(tmp_path, ObserveConfig(tensorboard=False, progress="off", profile=True))
    with observer.step_profile(1):
        observer.log_step(make_record(1))
    observer.close("stopped")
    assert "no profile: the run ended before step 10; lower observe.profile_start" in capsys.readouterr().out


def test_an_evaluation_that_is_not_finite_is_null_and_said(tmp_path, capsys):
    observer = make_observer(tmp_path)
    observer.log_eval(3, math.inf)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "eval_loss": None}]
    assert "step 3: evaluation loss is not finite" in capsys.readouterr().out


def test_the_time_left_follows_the_recent_pace():
    pace = Pace(num_records=3)
    pace.add(100.0, 50)
    assert pace.seconds_left(60) is None
    pace.add(110.0, 51)  # a slow first step
    assert pace.seconds_left(61) == pytest.approx(100.0)
    for now, step in ((111.0, 52), (112.0, 53), (113.0, 54)):
        pace.add(now, step)
    assert pace.seconds_left(64) == pytest.approx(10.0)
    assert pace.seconds_left(54) == 0.0


def test_a_loss_that_is_none_is_not_served_as_the_one_before(tmp_path):
    observer = make_observer(tmp_path, replace(PLAIN, log_interval=1, prometheus="127.0.0.1:0"))
    for step, loss in ((1, 5.0), (2, math.nan)):
        observer.log_step(make_record(step, loss=loss))
    observer.log_eval(2, 3.5)
    text = observer._main._server.text()
    observer.close("finished")
    assert re.search(r"fsdmoe_train_loss\{.*\} nan\n", text)
    assert re.search(r"fsdmoe_train_grad_norm\{.*\} 0\.5\n", text)
    assert re.search(r"fsdmoe_eval_loss\{.*\} 3\.5\n", text)
