"""Event files, read back through TensorBoard's own reader."""

import re
import threading
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from fsdmoe.observe.board import Board, _leave_errors_to_caller
from fsdmoe.observe.charts import load_picture

LOADS = {"layers.1": torch.tensor([3.0, 1.0, 0.0, 4.0])}


def make_board(folder: Path, start_step: int = 0, heatmap_interval: int = 10) -> Board:
    return Board(folder, start_step=start_step, heatmap_interval=heatmap_interval, heatmap_columns=8)


def make_row(step: int, **changes) -> dict:
    row = {
        "step": step, "tokens": 100 * step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 0.5,
        "tokens_per_s": 100.0, "tflops": 2.0, "mfu": None, "memory_gib": 1.5, "seconds": 1.0, "skipped": 0,
        "experts": {"layers.1": {"max_over_mean": 2.0, "cv": 0.79, "dead_fraction": 0.25, "entropy": None}},
    }  # fmt: skip
    return row | changes


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def age(folder: Path) -> None:
    """Files of one second are read in the order of their names, whose numbers are not padded."""
    for path in folder.glob("events.out.tfevents.*"):
        path.rename(path.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", path.name)))


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_rows_and_evaluations_come_back_as_scalars(tmp_path):
    board = make_board(tmp_path)
    for step in (1, 2, 4):
        board.step(make_row(step), LOADS)
    board.evaluation({"step": 4, "eval_loss": 2.25})
    board.close()
    assert scalars(tmp_path, "train/loss") == [(1, 5.0), (2, 2.5), (4, 1.25)]
    assert scalars(tmp_path, "eval/loss") == [(4, 2.25)]
    assert scalars(tmp_path, "speed/tokens_per_s") == [(1, 100.0), (2, 100.0), (4, 100.0)]
    assert scalars(tmp_path, "experts_dead_fraction/mean") == [(1, 0.25), (2, 0.25), (4, 0.25)]
    assert set(read(tmp_path).Tags()["scalars"]) == {
        "train/loss", "train/lr", "train/grad_norm", "eval/loss", "speed/tokens_per_s", "speed/tflops",
        "memory/peak_gib",
        *(f"experts_{name}/{over}" for name in ("max_over_mean", "cv", "dead_fraction")
          for over in ("mean", "max", "min")),
    }  # fmt: skip


def test_48_layers_have_few_tags_that_tell_the_mean_and_the_extremes(tmp_path):
    board = make_board(tmp_path)
    names = ("max_over_mean", "cv", "dead_fraction", "entropy")
    experts = {f"layer {n}": dict.fromkeys(names, 1.0 + n) for n in range(48)}
    experts["layer 7"] = dict.fromkeys(names)
    row = make_row(1, experts=experts, mfu=0.4, loss_scale=2.0)
    board.step(row, dict.fromkeys(experts, LOADS["layers.1"]))
    board.evaluation({"step": 1, "eval_loss": 2.25})
    board.close()
    tags = read(tmp_path).Tags()
    assert len(tags["scalars"]) + len(tags["images"]) <= 24
    known = [1.0 + n for n in range(48) if n != 7]
    assert scalars(tmp_path, "experts_cv/mean") == [(1, pytest.approx(sum(known) / 47))]
    assert scalars(tmp_path, "experts_cv/max") == [(1, 48.0)]
    assert scalars(tmp_path, "experts_cv/min") == [(1, 1.0)]


def test_the_heat_map_holds_the_counts_of_every_step_so_far(tmp_path):
    board = make_board(tmp_path)
    for step in range(1, 14):
        board.step(make_row(step), {"layers.1": torch.tensor([step, 1.0, 0.0, 4.0])})
    board.close()
    images = read(tmp_path).Images("expert_load")
    assert [image.step for image in images] == [10, 13]
    # 13 steps in at most 8 columns: two steps a column.
    pairs = [sum(range(first, min(first + 2, 14))) for first in range(1, 14, 2)]
    sizes = [2.0] * 6 + [1.0]
    counts_EC = torch.tensor([pairs, sizes, [0.0] * 7, [4 * size for size in sizes]])
    expected = load_picture({"layers.1": counts_EC}, first_step=1, last_step=13)
    assert images[-1].encoded_image_string == expected


@pytest.mark.parametrize(
    ("interval", "logged", "expected"),
    [
        (10, (7, 14, 21, 35), [14, 35]),
        (10, range(10, 101, 10), [10, 20, 30, 50, 80, 100]),  # drawn where the run is half as long again
        (0, (7, 14), None),
    ],
)
def test_pictures_keep_their_interval_whatever_steps_are_logged(tmp_path, interval, logged, expected):
    board = make_board(tmp_path, heatmap_interval=interval)
    for step in logged:
        board.step(make_row(step), LOADS)
    board.close()
    events = read(tmp_path)
    if expected is None:
        assert events.Tags()["images"] == []
    else:
        assert [image.step for image in events.Images("expert_load")] == expected


def test_a_resume_hides_what_was_written_after_it(tmp_path):
    board = make_board(tmp_path)
    for step in (1, 2, 3, 4):
        board.step(make_row(step), LOADS)
    board.close()
    age(tmp_path)
    resumed = make_board(tmp_path, start_step=2)
    resumed.step(make_row(3, loss=9.0), LOADS)
    resumed.close()
    assert scalars(tmp_path, "train/loss") == [(1, 5.0), (2, 2.5), (3, 9.0)]


def test_the_heat_map_of_a_resumed_run_goes_on(tmp_path):
    def steps(folder, first, last, start_step=0):
        board = make_board(folder, start_step=start_step)
        for step in range(first, last + 1):
            board.step(make_row(step), {"layers.1": torch.tensor([step, 1.0, 0.0, 4.0])})
        board.close()
        return read(folder).Images("expert_load")[-1].encoded_image_string

    whole = steps(tmp_path / "whole", 1, 13)
    steps(tmp_path / "resumed", 1, 6)
    age(tmp_path / "resumed")
    assert steps(tmp_path / "resumed", 7, 13, start_step=6) == whole


def test_what_its_thread_cannot_write_is_raised_here_and_printed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    _leave_errors_to_caller.cache_clear()
    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        make_board(tmp_path)
    _leave_errors_to_caller.cache_clear()
    for thread in threading.enumerate():
        if type(thread).__module__ == RecordWriter.__module__.replace("record_writer", "event_file_writer"):
            thread.join(10)
    assert "Traceback" not in capsys.readouterr().err
    other = threading.Thread(target=full)
    other.start()
    other.join()
    assert "Traceback" in capsys.readouterr().err, "of other threads it is"
