"""What a run goes on with when its launcher starts its ranks again, where ``checkpoint.load`` begins anew.

``none``, a checkpoint inside of the run's own folder, and ``load_only_model`` with the run's own newest are
meant for one start. A launcher repeats the whole command after a lost rank, and taken literally that would
drop what was trained since. So the first start notes in the run's folder who launched it, with which words,
and which checkpoints were there; a later start of the same launch goes on with what came after these. A run
that is finished takes the note away.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from fsdmoe.checkpoint.catalog import Entry
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core import failures

COURSE = "course.json"


@dataclass(frozen=True)
class Course:
    """Which checkpoints of a folder a run may go on from, and go back to. Its fields are JSON."""

    newest: int = -1
    """The newest serial when it began; -1 without one."""
    others: Sequence[int | str] = ()
    """Not of this course: serials, and names of those that cannot be read."""

    @classmethod
    def after(cls, found: list[Entry], resumed: str) -> Course:
        """That which begins with a start that has ``found`` these, the newest first, and has ``resumed`` the
        one of that name, or none of them."""
        newest = next((entry.serial for entry in found if entry.serial), -1)
        others = takewhile(lambda entry: entry.name != resumed, found)
        return cls(newest, [entry.serial or entry.name for entry in others])

    def has(self, entry: Entry) -> bool:
        return entry.serial not in self.others and entry.name not in self.others


def note(run: str, course: Course, words: list[Any]) -> None:
    """Keep what the course that begins with this start has found. ``words``: what the start was asked for."""
    folder = _local(run)
    if folder is None or not failures.has_launcher():
        return
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{COURSE}"
    facts = {"words": words, **_launch(), **asdict(course)}
    new.write_text(json.dumps(facts), encoding="utf-8")
    new.replace(folder / COURSE)


def noted(run: str, words: list[Any]) -> Tree | None:
    """The fields of the :class:`Course` that an earlier start of the same launch has begun with the same
    words; None where this is its first."""
    folder = _local(run)
    if folder is None or not failures.has_launcher():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        then, now = json.loads((folder / COURSE).read_text(encoding="utf-8")), _launch()
        # An agent of its own has a job that was requeued, or whose first rank moved; it keeps its id.
        is_same_job = then["id"] == now["id"] != ""
        if then["words"] == words and (then["agent"] == now["agent"] or is_same_job):
            return {"newest": then["newest"], "others": then["others"]}
    return None


def remove_note(run: str) -> None:
    """The run is finished: the same command is another course."""
    folder = _local(run)
    if folder is not None:
        with suppress(OSError):
            (folder / COURSE).unlink()


def _local(run: str) -> Path | None:
    path = run.removeprefix("file://")
    return None if "://" in path else Path(path).expanduser()


def _launch() -> dict[str, str]:
    """Who starts the ranks, as far as this one knows."""
    agent = os.getppid()
    return {
        "agent": f"{socket.gethostname()} {failures.process_space()} {agent} {failures.began(agent)}",
        "id": failures.launch_id(),
    }
