"""A thread that notices a step which does not end, asks all ranks where they are, and ends the run with the
answer; and stacks of all ranks on a signal.

The thread of every rank beats once a second. Where no step has ended for too long, each writes its stacks to
the run's folder and its open collectives to the store. The lowest rank that is still there says which rank
never came to which collective. All of them end, so that a launcher can start anew.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdmoe.core import events, failures
from fsdmoe.health.flight import Record, entries, explain, open_collectives

_KEY, _ASK_KEY = "fsdmoe/hang-of-rank-", "fsdmoe/stacks"
_BEAT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


class HangWatch:
    """The thread of one rank, from the first step to :meth:`close`."""

    def __init__(self, seconds: float, folder: Path, places: list[str]) -> None:
        self._seconds = seconds
        self._places = places
        self._folder = folder
        self._rank = dist.get_rank()
        # a connection of its own: the loop's may be waiting
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._is_over = threading.Event()
        self._last: float | None = None
        self.step = 0
        stacks = folder / "stacks"
        stacks.mkdir(parents=True, exist_ok=True)
        # Behind those of earlier starts: a launcher starts a run that hung again at once.
        self._stacks = (stacks / f"rank_{self._rank}.txt").open("a")
        if self._stacks.tell():
            self._stacks.write(f"\nanother start, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            self._stacks.flush()
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._written = os.fstat(self._stacks.fileno()).st_size
        self._asked = 0
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def end_step(self) -> None:
        """The next one has its time from here on. (Before the first, compilation may take any.)"""
        self.step += 1
        self._last = time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()

    def _watch(self) -> None:
        while not self._is_over.wait(_BEAT_SECONDS):
            last = self._last
            if last is not None and time.monotonic() - last > self._seconds:
                self._end()
            try:
                self._share_stacks()
            except RuntimeError:  # the store is gone with the rank that held it; the loop will find out
                return

    def _share_stacks(self) -> None:
        """A signal that one rank received is every rank's."""
        size = os.fstat(self._stacks.fileno()).st_size
        if size > self._written:
            self._written = size
            self._asked = self._store.add(_ASK_KEY, 1)
        elif (asked := self._store.add(_ASK_KEY, 0)) > self._asked:
            self._asked = asked
            self._dump_stacks()

    def _dump_stacks(self) -> None:
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._written = os.fstat(self._stacks.fileno()).st_size

    def _end(self) -> None:
        self._dump_stacks()
        try:
            answers = self._ask()
        except RuntimeError:
            answers = {self._rank: {}}
        causes = explain(answers, self._places)
        text = (
            f"step {self.step + 1} of this start has not ended for {self._seconds:g} s (health.hang_seconds)"
            f": {'; '.join(causes)}. Stacks of all ranks are in {self._folder}/stacks; the run ends, "
            "start it again to go on from its newest checkpoint"
        )
        failures.write_error_file(text)
        if self._rank == min(answers):
            failures.keep(text, self._folder)
            events.append(self._folder, "fault", text=text)
            print(f"fsdmoe: {text}", file=sys.stderr, flush=True)
        else:
            time.sleep(_BEAT_SECONDS)  # the launcher ends all once one has ended: the others' stacks first
        os._exit(failures.TRY_AGAIN)

    def _ask(self) -> dict[int, Record]:
        """What the ranks have on record that answer in time."""
        self._store.set(f"{_KEY}{self._rank}", json.dumps(open_collectives(entries())))
        deadline = time.monotonic() + _ANSWER_SECONDS + _BEAT_SECONDS
        keys = {rank: f"{_KEY}{rank}" for rank in range(len(self._places))}
        while time.monotonic() < deadline and not self._store.check(list(keys.values())):
            time.sleep(0.1)
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: json.loads(self._store.get(key)) for rank, key in there.items()}
