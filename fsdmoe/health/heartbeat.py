"""Threads that notice a node which has gone silent without closing its connections.

A rank that dies closes its connections, and all others end at once. A node whose power or network is gone
closes nothing: the others would wait in a collective until it times out. So each rank writes a number to the
store every few seconds, another one each time, and looks at that of the rank before it. If what it finds has
not changed for too long, it says which ranks are silent and ends; with it end all that are connected to it.

One thread talks to the store, where it may wait for ever, and one watches it: a store that is silent is found
in the same way. Neither does anything in a step.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdmoe.core import events, failures
from fsdmoe.core.rank_facts import RankFacts

_KEY = "fsdmoe/beat-of-rank-"
_OVER = b"over"
"""The beat of a rank whose run has ended in order: it may be silent."""
_BEATS = 12
"""In the time after which a rank is lost."""
_CLOSE_SECONDS = 2.0


def has_several_nodes(facts: Sequence[RankFacts]) -> bool:
    """Whether some rank was started on a node that has not all of them."""
    return any(fact.node_size not in (None, str(len(facts))) for fact in facts)


class Listener:
    """What one rank hears of another, beat by beat."""

    def __init__(self) -> None:
        self._last: object = None
        self._num_quiet = 0

    def is_lost(self, heard: bytes | None) -> bool:
        """Whether what was heard last has been the same for too long."""
        self._num_quiet = 0 if heard != self._last else self._num_quiet + 1
        self._last = heard
        return heard != _OVER and self._num_quiet >= _BEATS


class Heartbeats:
    """The threads of one rank, until :meth:`close`. Building it is collective: all ranks have beaten once."""

    def __init__(self, seconds: float, folder: Path, places: Sequence[str]) -> None:
        self._seconds = seconds
        self._folder = folder
        self._places = places
        self._rank = dist.get_rank()
        # a connection of its own: the loop's may be waiting
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._is_over = threading.Event()
        self._is_store_gone = False
        self._num_beats = 0
        self._heard: bytes | None = None
        self._store.set(self._key(self._rank), "begins")
        dist.barrier()
        self._threads = [
            threading.Thread(target=act, name="heartbeat", daemon=True) for act in (self._talk, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """This rank may be silent from here on."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)  # no longer: the store may not answer

    def _key(self, rank: int) -> str:
        return f"{_KEY}{rank % len(self._places)}"

    def _talk(self) -> None:
        try:
            while not self._is_over.wait(self._seconds / _BEATS):
                self._num_beats += 1
                self._store.set(self._key(self._rank), str(self._num_beats))
                self._heard = self._store.get(self._key(self._rank - 1))
            self._store.set(self._key(self._rank), _OVER)
        except RuntimeError:  # it has closed its connections: the loop will find out
            self._is_store_gone = True

    def _watch(self) -> None:
        listener = Listener()
        num_beats = 0
        while not self._is_over.wait(self._seconds / _BEATS) and not self._is_store_gone:
            if listener.is_lost(self._heard):
                self._end(is_store_silent=self._num_beats == num_beats)
            num_beats = self._num_beats

    def _end(self, *, is_store_silent: bool) -> None:
        who = self._places[self._rank - 1]
        if is_store_silent:
            who = "the store of the run, on the first node or where its launchers meet,"
        text = (
            f"{who} has not been heard of for {self._seconds:g} s (health.silent_seconds): its node is "
            f"stopped, or its network is gone. {self._places[self._rank]} ends, and the others with it; "
            "start the run again to go on from its newest checkpoint"
        )
        failures.write_error_file(text)
        failures.keep(text, self._folder)
        events.append(self._folder, "fault", text=text)
        print(f"fsdmoe: {text}", file=sys.stderr, flush=True)
        os._exit(failures.TRY_AGAIN)
