"""How a run ends: by a signal, by a rank that died, or because it is done."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.core import failures
from fsdmoe.core.errors import ConfigError, UserError

_ECHO_SECONDS = 1.0
_WATCH_SECONDS = 1.0
_LAUNCHER_GONE = signal.NSIG
"""Among the signals received: the launcher is gone, for which there is no signal."""


def refuse_endless_skips(in_a_row: int, most: int) -> None:
    """Stop a run that no longer trains."""
    if in_a_row > most:
        raise ConfigError(
            f"train.max_skipped_steps: {in_a_row} steps in a row were skipped, for a loss or gradient that "
            "is not finite or by health.on_spike; lower optim.lr or look at the data"
        )


def signal_of_any_rank(received: Sequence[int], device: torch.device) -> str:
    """The name of a signal that some rank has received, or that its launcher is gone, the same on all of
    them; empty: none.

    Asked through the hosts where these have a backend (gloo): on the device, the answer would come behind all
    that was issued there, and the host could not issue the next step before this one is done."""
    world = dist.group.WORLD
    assert world is not None
    host = torch.device("cpu")
    asked = host if host in world._device_types else device
    largest = torch.tensor([float(received[0] if received else 0)], device=asked)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world)
    number = int(largest.item())
    if number == _LAUNCHER_GONE:
        return "the end of its launcher"
    return signal.Signals(number).name if number else ""


class AskedToStop(Exception):
    """Some rank has received the signal of this name; raised on all of them."""


def leave_if_asked(received: Sequence[int], device: torch.device) -> None:
    """Raise :class:`AskedToStop` on all ranks where one has received a signal. Collective."""
    if asked := signal_of_any_rank(received, device):
        raise AskedToStop(asked)


STOPPED = "stopped by "
"""How the status of a run begins that ended at a signal."""


def exit_code(status: str, received: list[int]) -> int:
    """Of a rank whose run ended in order.

    A signal that only other ranks received is the end of their node, not of the run: where the launcher
    restarts ranks, this one asks for it. A rank that is alone answers a signal as a launcher does: whoever
    sent it learns that the run is not finished.
    """
    if not status.startswith(STOPPED):
        return 0
    if not received:
        return failures.TRY_AGAIN if failures.will_restart() else 0
    is_alone = not failures.has_launcher() and dist.get_world_size() == 1
    return 128 + received[0] if is_alone else 0


@contextmanager
def watch_launcher(folder: Path, received: list[int]) -> Iterator[None]:
    """Stop as after SIGTERM once the launcher is gone: nobody would end or restart this rank any more."""
    if not failures.has_launcher():
        yield
        return
    launcher, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            if os.getppid() != launcher:
                rank = failures.own_rank()
                text = (
                    f"rank {rank}: the launcher (pid {launcher}) is gone, so this rank stops after its step "
                    "and a checkpoint; start the run again to go on from there"
                )
                failures.keep(text, folder)
                received.append(_LAUNCHER_GONE)
                os.kill(os.getpid(), signal.SIGTERM)
                if rank == 0:
                    with suppress(OSError):  # the terminal may be gone too
                        print(f"fsdmoe: {text}", file=sys.stderr, flush=True)
                return

    thread = threading.Thread(target=watch, name="watch-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Ending:
    """How a run ends: a context around all of it, which says why it failed and closes what was opened.

    Errors of the user and lost peers are reported and end here; all others are raised again, for their
    traceback.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        """Where errors are kept; None: it is another run's."""
        self.status, self.code = "failed", 1
        self.progress: Mapping[str, int] = {"step": -1}
        """How far the run came."""
        self.on_close: Callable[[str], None] = lambda status: None
        """Called with the status at the end, however it came."""
        self.last = ExitStack()
        """Called when all is said and closed, the latest first."""
        self.received: list[int] = []
        """The signals caught so far."""
        self._handlers: dict[int, Any] = {}
        """Those in force before signals were caught."""

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        try:
            return error is None or self._explain(error)
        finally:
            self._close()
            self.last.close()
            self._release_signals()

    def catch_signals(self) -> list[int]:
        """From here on SIGTERM and Ctrl-C stop the run after its step; a second Ctrl-C stops it at once.

        They stay caught until all is said and closed: when a rank dies, the launcher asks the others to stop
        while they are at it. The list that is returned holds the signals received so far.
        """
        first = 0.0

        def remember(number: int, _: FrameType | None) -> None:
            nonlocal first
            # A launcher forwards the Ctrl-C that its ranks received too: a second one soon is that echo.
            is_echo = time.monotonic() - first < _ECHO_SECONDS
            # torchrun tells its ranks of a second Ctrl-C by SIGTERM.
            if self.received and not is_echo and signal.SIGINT in (number, self.received[0]):
                first = time.monotonic()
                raise KeyboardInterrupt
            first = first or time.monotonic()
            self.received.append(number)
            failures.write_error_file(
                f"rank {failures.own_rank()} was asked to stop ({signal.Signals(number).name})",
                is_first=False,
            )

        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, remember)
        return self.received

    def _release_signals(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _close(self) -> None:
        close, self.on_close = self.on_close, lambda status: None
        close(self.status)

    def _explain(self, error: BaseException) -> bool:
        """Whether everything is said about it."""
        step = self.progress["step"] + 1
        self.code = 1
        if isinstance(error, UserError):
            self.status, self.code = str(error), error.exit_code
            failures.report_error(error, self.folder, self.received)
        elif isinstance(error, KeyboardInterrupt):
            self.status, self.code = "interrupted", 128 + signal.SIGINT
        elif (message := failures.lost_peer_message(error, step)) is not None:
            self._close()  # a launcher waits half a minute before it ends a rank that it asked to stop
            failures.report_lost_peer(message, self.folder, self.received)
        else:
            if isinstance(error, Exception):
                failures.report_crash(error, step, self.folder, self.received)
            return False
        return True
