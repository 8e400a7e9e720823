"""``events.jsonl`` in a run's folder: what happened to the run, a JSON object a line, of all its starts.

=========  ====================================  =====================================================
event      when                                  with
=========  ====================================  =====================================================
start      a run begins, before its first step   ``step`` (0, or of the checkpoint), ``ranks``, ``began``
                                                 (when its launcher, or this rank, was started)
restart    the same, where it was begun before   the same; ``changed``: what the configuration has
                                                 otherwise than at the last start (``lr 0.1 -> 0.2``)
ready      the first step of a start is done     ``step``
save       the loop goes on after a save         ``step``, ``stall`` (seconds that it waited)
fault      something is wrong                    ``text``
rollback   the run goes back by itself           ``step`` that it continues from
end        a run has ended, well or not          ``step``, ``status``
=========  ====================================  =====================================================

``time`` is in seconds since 1970. A run that is killed has no ``end``.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def append(folder: Path, event: str, **facts: Any) -> None:
    """Add a line, if that is possible: what looks after a run must not end it."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
    with suppress(OSError), (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(line)


def read(folder: Path) -> list[dict[str, Any]]:
    """All whole lines, in order; none without a file."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for line in (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and {"time", "event"} <= row.keys():
                    found.append(row)
    return found
