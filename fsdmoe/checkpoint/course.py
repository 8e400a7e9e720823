"""What a run goes on with when its launcher starts its ranks again, where ``checkpoint.load`` begins anew.

``none``, a checkpoint inside of the run's own folder, and ``load_only_model`` with the run's own newest are
meant for one start. A launcher repeats the whole command after a lost rank, and taken literally that would
drop what was trained since. So the first start notes in the run's folder who launched it, and which
checkpoints were there; a later start of the same launch goes on with what came after these.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdmoe import failures

COURSE = "course.json"
_NO_RENDEZVOUS = ("", "none")


@dataclass(frozen=True)
class Course:
    """What was there when it began, by the serials of checkpoints."""

    newest: int
    """-1 without one."""
    others: frozenset[int]
    """Those that it does not go on from."""


def note(run: Path, begun: Course) -> None:
    """Keep what the course that begins with this start has found."""
    if not failures.has_launcher():
        return
    run.mkdir(parents=True, exist_ok=True)
    new = run / f".{COURSE}"
    facts = _launch() | {"newest": begun.newest, "others": sorted(begun.others)}
    new.write_text(json.dumps(facts), encoding="utf-8")
    new.replace(run / COURSE)


def noted(run: Path) -> Course | None:
    """What an earlier start of the same launch has noted; None where this is its first."""
    if not failures.has_launcher():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        then, now = json.loads((run / COURSE).read_text(encoding="utf-8")), _launch()
        # An agent of its own has a job that was requeued, or whose first rank moved; it keeps its id.
        is_same_job = then["id"] == now["id"] and now["id"] not in _NO_RENDEZVOUS
        if then["agent"] == now["agent"] or is_same_job:
            return Course(then["newest"], frozenset(then["others"]))
    return None


def _launch() -> dict[str, Any]:
    """Who starts the ranks, as far as this one knows."""
    agent = os.getppid()
    return {
        "agent": f"{socket.gethostname()} {failures.process_space()} {agent} {failures.began(agent)}",
        "id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
    }
