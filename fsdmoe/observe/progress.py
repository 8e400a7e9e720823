"""A line for whatever keeps the user waiting: said after two seconds, with the time it took at the end."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

PATIENCE_SECONDS = 2.0

Say = Callable[[str], None]
Cancel = Callable[[], None]


class Clock:
    """The machine's time, and an alarm: a thread that ends with it."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def call_later(self, seconds: float, action: Callable[[], None]) -> Cancel:
        """Call ``action`` in so many seconds, unless cancelled; after ``cancel()`` it does not run."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True  # a program that is ending does not wait for it
        timer.start()

        def cancel() -> None:
            timer.cancel()
            timer.join()

        return cancel


@contextmanager
def progress_line(what: str, *, say: Say | None = None, clock: Clock | None = None) -> Iterator[None]:
    """Around something that may last: ``with progress_line("sharding the model"): ...``.

    Only the first rank speaks, and nobody where it is over within two seconds.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    say, clock = say or _print, clock or Clock()
    said: list[str] = []

    def begin() -> None:
        said.append(what)
        say(f"{what} ...")

    began = clock.now()
    cancel = clock.call_later(PATIENCE_SECONDS, begin)
    try:
        yield
    finally:
        cancel()
    if said:  # after an error the time does not matter: the error is the next line
        say(f"{what}: {clock.now() - began:.1f} s")


def _print(line: str) -> None:
    """On the error stream: the standard output may be the answer of ``--evaluate-only``."""
    print(line, file=sys.stderr, flush=True)
