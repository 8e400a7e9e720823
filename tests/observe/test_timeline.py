"""Timelines of recorded events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.core import events, failures
from fsdmoe.observe.timeline import changes_of, drawing, goodput, lives_of, spans_of, timeline_lines


def _row(time: float, event: str, step: int = 0, **facts: Any) -> dict[str, Any]:
    return {"time": time, "event": event, "step": step, **facts}


KILLED = [
    _row(0, "start"), _row(10, "ready", 1), _row(50, "save", 40, stall=2.0),
    _row(60, "fault", 50, text="slow"), _row(80, "restart", 40),
    _row(90, "ready", 41), _row(190, "end", 140, status="finished"),
]  # fmt: skip


def test_what_a_later_start_did_not_have_is_lost() -> None:
    spans = spans_of(lives_of(KILLED))
    assert [(span.kind, span.begin, span.end) for span in spans] == [
        ("setup", 0, 10), ("training", 10, 48), ("saving", 48, 50), ("lost", 50, 60), ("down", 60, 80),
        ("setup", 80, 90), ("training", 90, 190),
    ]  # fmt: skip
    assert goodput(spans) == pytest.approx((38 + 100) / 190)


def test_steps_up_to_the_one_that_a_later_start_resumed_at_are_kept_without_a_save() -> None:
    found = [
        _row(0, "start"), _row(10, "ready", 1), _row(90, "end", 9, status="failed"),
        _row(100, "restart", 8), _row(110, "ready", 9), _row(150, "end", 13, status="finished"),
    ]  # fmt: skip
    assert [(span.kind, span.begin, span.end) for span in spans_of(lives_of(found))] == [
        ("setup", 0, 10), ("training", 10, 80), ("lost", 80, 90), ("down", 90, 100),
        ("setup", 100, 110), ("training", 110, 150),
    ]  # fmt: skip


@pytest.mark.parametrize(("began", "ended"), [(100, 80), (60, 60)])
def test_a_killed_start_lasted_as_long_as_the_steps_that_the_next_one_had(began: int, ended: int) -> None:
    found = [
        _row(0, "start"), _row(10, "ready", 1), _row(100, "restart", 8, began=began),
        _row(110, "ready", 9), _row(150, "end", 13, status="finished"),
    ]  # fmt: skip
    first = lives_of(found)[0]
    assert (first.last_step, first.ended) == (8, ended)
    trained = [(span.begin, span.end) for span in spans_of(lives_of(found)) if span.kind == "training"]
    assert trained == [(10, ended), (110, 150)]


def test_changes_are_told_where_steps_of_before_and_after_are_left() -> None:
    found = [
        _row(0, "start"), _row(10, "restart", 40, changed=["optim.lr 0.1 -> 0.2", "train.steps 9 -> 99"]),
        _row(20, "restart", 60, changed=["optim.lr 0.2 -> 0.3"]), _row(30, "restart", 50),
    ]  # fmt: skip
    first = "from step 41 on: optim.lr 0.1 -> 0.2, train.steps 9 -> 99"
    assert changes_of(found[:3]) == [first, "from step 61 on: optim.lr 0.2 -> 0.3"]
    assert changes_of(found) == [first, "from step 51 on: optim.lr 0.2 -> 0.3"], "what it kept"
    back = [
        *found,
        _row(40, "restart", 30, changed=["checkpoint.load 'latest' -> 'x'", "train.steps 99 -> 9"]),
    ]
    assert changes_of(back) == ["from step 31 on: optim.lr 0.1 -> 0.3"], "as the last start has it"
    assert changes_of([*back, _row(50, "restart", 0, changed=["train.seed 1 -> 2"])]) == []


def test_the_time_of_a_hang_is_lost() -> None:
    found = [
        _row(0, "start"), _row(0, "ready", 1), _row(40, "save", 40), {"time": 90, "event": "fault"},
        _row(90, "restart", 40), _row(90, "ready", 41), _row(100, "end", 51, status="finished"),
    ]  # fmt: skip
    assert goodput(spans_of(lives_of(found))) == pytest.approx(0.5)


def test_setup_counts_from_the_start_of_the_process_and_never_into_the_start_before() -> None:
    found = [
        _row(40, "start", began=10), _row(50, "ready", 1), _row(60, "save", 10),
        _row(90, "restart", 10, began=5), _row(100, "ready", 11), _row(130, "end", 40, status="finished"),
    ]  # fmt: skip
    assert [(span.kind, span.begin, span.end) for span in spans_of(lives_of(found))] == [
        ("setup", 10, 50), ("training", 50, 60), ("setup", 60, 100), ("training", 100, 130),
    ]  # fmt: skip


def test_a_start_is_dated_by_its_launcher_and_a_restart_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = {os.getpid(): 700, os.getppid(): 300}
    monkeypatch.setattr(failures, "began", lambda pid: str(ticks[pid]))
    monkeypatch.setattr(failures.time, "clock_gettime", lambda _: 100.0)
    monkeypatch.setattr(failures.time, "time", lambda: 5000.0)
    monkeypatch.setattr(failures.os, "sysconf", lambda _: 100)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert failures.started_at() == 4907.0
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "x")
    assert failures.started_at() == 4903.0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert failures.started_at() == 4907.0
    monkeypatch.setattr(failures, "began", lambda pid: "")
    assert failures.started_at() is None


def test_the_timeline_is_drawn_with_its_faults() -> None:
    lines = timeline_lines(KILLED)
    assert lines[0] == drawing(spans_of(lives_of(KILLED)))
    assert lines[0].startswith("sss")
    assert lines[0].endswith("===")
    assert "  fault: slow" in lines
    assert lines[-1] == "goodput 0.726 of 190 s, 2 starts"


def test_a_start_that_ended_before_its_first_step_made_no_progress() -> None:
    found = [_row(0, "start"), _row(30, "end", status="failed")]
    assert goodput(spans_of(lives_of(found))) == 0.0


def test_steps_that_were_rolled_back_are_lost() -> None:
    found = [_row(0, "start"), _row(0, "ready", 1), _row(40, "save", 40), _row(60, "fault", 60, text="spike"),
             _row(60, "rollback", 40), _row(100, "end", 80, status="finished")]  # fmt: skip
    assert goodput(spans_of(lives_of(found))) == pytest.approx(0.8)
    assert timeline_lines(found)[-1] == "goodput 0.800 of 100 s, 1 start"
    found += [_row(100, "restart", 60), _row(100, "ready", 61)]  # half of the steps since were kept
    assert goodput(spans_of(lives_of(found))) == pytest.approx(0.6)


def test_events_are_read_back_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    events.append(tmp_path, "save", step=3, stall=0.5)
    with (tmp_path / events.EVENTS).open("a") as file:
        file.write(json.dumps({"time": 1, "event": "end"})[:9])
    assert [(row["event"], row["step"]) for row in events.read(tmp_path)] == [("save", 3)]
    assert events.read(tmp_path / "none") == []
