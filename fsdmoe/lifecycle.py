"""How a run ends: by a signal, by a rank that died, or because it is done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from fsdmoe import failures
from fsdmoe.errors import ConfigError, UserError

_ECHO_SECONDS = 1.0
_WATCH_SECONDS = 1.0


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C stop the run after the current step; a second Ctrl-C stops it at once.

    A launcher forwards the Ctrl-C that it received to ranks that received it already: a second one within a
    second is that echo. The list that is yielded holds the signals received so far.
    """
    received: list[int] = []
    first = 0.0

    def remember(number: int, _: FrameType | None) -> None:
        nonlocal first
        if received and number == signal.SIGINT and time.monotonic() - first > _ECHO_SECONDS:
            raise KeyboardInterrupt
        first = first or time.monotonic()
        received.append(number)
        failures.write_error_file(
            f"rank {failures.own_rank()} was asked to stop ({signal.Signals(number).name})", is_first=False
        )

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    except BaseException:  # while signals are still caught: the next one may end this rank in mid-sentence
        failures.write_error_file(f"rank {failures.own_rank()} is about to end", is_first=False)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_endless_skips(in_a_row: int, most: int) -> None:
    """Stop a run that no longer trains."""
    if in_a_row > most:
        raise ConfigError(
            f"train.max_skipped_steps: {in_a_row} steps in a row were not finite in loss or gradient; lower "
            "optim.lr or look at the data"
        )


def any_rank(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``flag`` holds on any rank of the group; every rank gets the same answer."""
    value = torch.tensor([float(flag)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


@contextmanager
def watch_launcher(folder: Path) -> Iterator[None]:
    """Stop as after SIGTERM once the launcher is gone: nobody would end or restart this rank any more."""
    if not failures.has_launcher():
        yield
        return
    launcher, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            if os.getppid() != launcher:
                failures.keep(
                    f"rank {failures.own_rank()}: the launcher (pid {launcher}) is gone, so this rank stops "
                    "after its step and a checkpoint; start the run again to go on from there",
                    folder,
                )
                os.kill(os.getpid(), signal.SIGTERM)
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
        self.folder, self.status, self.code = folder, "failed", 1
        self.progress: Mapping[str, int] = {"step": -1}
        """How far the run came."""
        self.on_close: Callable[[str], None] = lambda status: None
        """Called with the status at the end, however it came."""

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        try:
            return error is None or self._explain(error)
        finally:
            self._close()

    def _close(self) -> None:
        close, self.on_close = self.on_close, lambda status: None
        close(self.status)

    def _explain(self, error: BaseException) -> bool:
        """Whether everything is said about it."""
        step = self.progress["step"] + 1
        self.code = 1
        if isinstance(error, UserError):
            self.status, self.code = str(error), error.exit_code
            failures.report_error(error, self.folder)
        elif isinstance(error, KeyboardInterrupt):
            self.status, self.code = "interrupted", 128 + signal.SIGINT
        elif (message := failures.lost_peer_message(error, step)) is not None:
            self._close()  # before the launcher ends this rank, which it may at any moment
            failures.report_lost_peer(message, self.folder)
        else:
            if isinstance(error, Exception):
                failures.report_crash(error, step, self.folder)
            return False
        return True


def shutdown(code: int) -> int:
    """Destroy the process group when the run ended normally (NCCL warns otherwise) and return ``code``.

    After a failure it is kept: destroying it may wait for ranks that never join.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    return code
