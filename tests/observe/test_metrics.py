"""Rows on disk: whole after a kill, without duplicates after a resume."""

import json
import math
import os

from fsdmoe.observe.metrics import MetricsFile, read_metrics


def write_rows(path, rows, start_step=0):
    file = MetricsFile(path, start_step=start_step)
    for row in rows:
        file.write(row)
    file.close()


def test_each_row_is_on_disk_before_the_next_one(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.write({"step": step, "loss": 1.0 / step})
        assert json.loads(path.read_text().splitlines()[-1]) == {"step": step, "loss": 1.0 / step}
    file.close()


def test_what_is_not_finite_becomes_null_at_any_depth(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(
        path, [{"step": 1, "loss": math.nan, "experts": {"layers.0": {"cv": math.inf, "entropy": 0.5}}}]
    )

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "experts": {"layers.0": {"cv": None, "entropy": 0.5}}}


def test_a_resume_drops_later_rows_and_goes_on_without_a_duplicate(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"step": step, "loss": float(step)} for step in range(1, 58)]
    write_rows(
        path, [*steps[:50], {"step": 50, "eval_loss": 3.0}, *steps[50:], {"step": 57, "eval_loss": 2.0}]
    )
    file = MetricsFile(path, start_step=50)
    assert file.num_dropped == 8
    assert file.kept == [*steps[:50], {"step": 50, "eval_loss": 3.0}]
    file.write({"step": 51, "loss": -1.0})
    file.close()
    rows = read_metrics(path)
    assert rows == [*steps[:50], {"step": 50, "eval_loss": 3.0}, {"step": 51, "loss": -1.0}]
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_line_left_by_a_kill_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [{"step": 1, "loss": 2.0}])
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    write_rows(path, [{"step": 2, "loss": 1.5}], start_step=1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.5},
    ]


def test_a_last_line_that_only_misses_its_end_of_line_is_kept_apart_from_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}')
    write_rows(path, [{"step": 2, "loss": 1.0}], start_step=1)
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


def test_a_new_run_in_an_old_folder_starts_from_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    write_rows(path, [{"step": 1, "loss": 5.0}], start_step=0)
    assert read_metrics(path) == [{"step": 1, "loss": 5.0}]


def test_a_full_disk_costs_rows_and_not_the_run(tmp_path, caplog):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    real, full = os.dup(file._file.fileno()), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file.fileno())
    for step in (2, 3):
        file.write({"step": step})
    os.dup2(real, file._file.fileno())
    for step in (4, 5):
        file.write({"step": step})
    file.close()
    os.close(real)
    os.close(full)
    found = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert (found[0], found[-2:]) == (1, [4, 5])
    assert sum("No space left on device" in record.message for record in caplog.records) == 1
