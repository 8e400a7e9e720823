"""Lines about what lasts, by a clock that the test turns."""

import threading
from collections.abc import Callable

import pytest

from fsdmoe.observe.progress import Clock, progress_line


class HandTurned:
    """Time stands still until ``turn``."""

    def __init__(self) -> None:
        self.time = 100.0
        self.alarms: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        alarm = (self.time + seconds, action)
        self.alarms.append(alarm)
        return lambda: self.alarms.remove(alarm) if alarm in self.alarms else None

    def turn(self, seconds: float) -> None:
        self.time += seconds
        due = [alarm for alarm in self.alarms if alarm[0] <= self.time]
        self.alarms = [alarm for alarm in self.alarms if alarm not in due]
        for _, action in due:
            action()


def test_what_lasts_is_said_after_two_seconds_and_timed_at_its_end():
    clock, said = HandTurned(), []
    with progress_line("sharding the model", say=said.append, clock=clock):
        clock.turn(1.9)
        assert said == []
        clock.turn(0.2)
        assert said == ["sharding the model ..."]
        clock.turn(6.2)
    assert said == ["sharding the model ...", "sharding the model: 8.3 s"]
    assert clock.alarms == []


def test_what_is_over_within_two_seconds_is_not_mentioned():
    clock, said = HandTurned(), []
    with progress_line("opening the data", say=said.append, clock=clock):
        clock.turn(1.9)
    clock.turn(10.0)
    assert said == []


def test_an_error_ends_the_waiting_without_a_time():
    clock, said = HandTurned(), []

    def fail():
        with progress_line("loading", say=said.append, clock=clock):
            clock.turn(3.0)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert said == ["loading ..."]
    assert clock.alarms == []


def test_the_systems_alarm_leaves_no_thread_behind():
    before = threading.active_count()
    rang = threading.Event()
    cancel = Clock().call_later(0.0, rang.set)
    assert rang.wait(60)
    cancel()
    Clock().call_later(3600.0, rang.clear)()
    assert rang.is_set()
    assert threading.active_count() == before
