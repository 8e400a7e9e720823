"""How a run ends: by a signal, by a rank that died, or because it is done."""

from __future__ import annotations

import datetime
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from fsdmoe.errors import ConfigError

_ECHO_SECONDS = 1.0
_REPORT_KEY = "fsdmoe/error-of-rank-0"
_REPORT_SECONDS = 2.0

# The errors of a connection whose other end is gone or silent. Backends raise many others (sizes that do not
# match, a device used twice): those are bugs of this run and need their traceback.
_GONE = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|timed out|timeout"
    r"|remote process exit|ncclremoteerror",
    re.IGNORECASE,
)


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

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
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


def lost_peer_message(error: BaseException, step: int) -> str | None:
    """A line for the user when ``error`` is what a dead or hung rank looks like from here; none otherwise."""
    if not _is_lost_peer(error):
        return None
    rank = dist.get_rank() if dist.is_initialized() else 0
    return (
        f"fsdmoe: rank {rank} lost contact with another rank in step {step}; it has died or hangs. "
        f"This rank stops too. The first error above, from the other rank, is the cause; seen here: {error}"
    )


def _is_lost_peer(error: BaseException) -> bool:
    """Only what the transport itself reports: gloo's sockets (a plain ``RuntimeError`` that names its source
    file), NCCL, or the store. The same words from a download or a user's own code are not it."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error)
    is_transport = isinstance(error, dist.DistBackendError) or "gloo/transport/" in text
    return is_transport and _GONE.search(text) is not None


def report_error(error: Exception) -> None:
    """Print an error that ends the run: once if all ranks raise it, else from the rank that raises it.

    Rank 0 stores the text of its error; another rank prints its own unless it finds the same text there soon.
    (A collective would not do: the others may be waiting in one of their own.)
    """
    rank, text = int(os.environ.get("RANK", "0")), str(error)
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if rank and store is not None and _was_reported(store, text):
        return
    print(f"fsdmoe: {f'rank {rank}: ' if rank else ''}{text}", file=sys.stderr, flush=True)
    if rank == 0 and store is not None:
        store.set(_REPORT_KEY, text)


def _was_reported(store: dist.Store, text: str) -> bool:
    try:
        store.wait([_REPORT_KEY], datetime.timedelta(seconds=_REPORT_SECONDS))
        return store.get(_REPORT_KEY).decode() == text
    except RuntimeError:  # nothing there in time, or the store is gone with rank 0
        return False


def shutdown(code: int) -> int:
    """Destroy the process group when the run ended normally (NCCL warns otherwise) and return ``code``.

    After a failure it is kept: destroying it may wait for ranks that never join.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    return code
