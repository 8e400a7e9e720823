"""How a run ends: by a signal, by a rank that died, or because it is done."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from fsdmoe.errors import ConfigError, UserError

ERRORS = "errors.txt"
"""In a run's folder: what its ranks said when they failed."""

_ECHO_SECONDS = 1.0
_WATCH_SECONDS = 1.0
_REPORT_KEY, _PROCESS_KEY = "fsdmoe/error-of-rank-", "fsdmoe/process-of-rank-"
_REPORT_SECONDS = 2.0
_ASIDE_SECONDS = 10.0
_LATER_SECONDS = 3600
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for a failed rank's message

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
        _write_error_file(f"rank {_rank()} was asked to stop ({signal.Signals(number).name})", is_first=False)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    except BaseException:  # while signals are still caught: the next one may end this rank in mid-sentence
        _write_error_file(f"rank {_rank()} is about to end", is_first=False)
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
    if _ERROR_FILE not in os.environ:
        yield
        return
    launcher, is_over = os.getppid(), threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            if os.getppid() != launcher:
                _keep(
                    f"rank {_rank()}: the launcher (pid {launcher}) is gone, so this rank stops after its "
                    "step and a checkpoint; start the run again to go on from there",
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
            self.on_close(self.status)

    def _explain(self, error: BaseException) -> bool:
        """Whether everything is said about it."""
        step = self.progress["step"] + 1
        self.code = 1
        if isinstance(error, UserError):
            self.status, self.code = str(error), error.exit_code
            report_error(error, self.folder)
        elif isinstance(error, KeyboardInterrupt):
            self.status, self.code = "interrupted", 128 + signal.SIGINT
        elif (message := lost_peer_message(error, step)) is not None:
            report_lost_peer(message, self.folder)
        else:
            if isinstance(error, Exception):
                report_crash(error, step, self.folder)
            return False
        return True


# What a rank says when it fails. A launcher shows the text of its error file as the root cause; without one
# the text goes to the terminal. The run's folder keeps it either way.


def expect_kill() -> None:
    """Put into the error file what cannot be written afterwards: why a rank ended that was killed."""
    _write_error_file(
        f"rank {_rank()} ended without a message of its own. Exit code -9 (SIGKILL): most probably the "
        "kernel ended it for want of host memory (`dmesg` says so); start fewer ranks on this host, lower "
        "data.num_workers or set checkpoint.asynchronous = false. Others: a crash inside of a library"
    )


def register_rank() -> None:
    """Let the other ranks know which process this one is, so that they can say which one has died."""
    store = _store()
    if store is not None:
        store.set(f"{_PROCESS_KEY}{_rank()}", f"{os.getpid()} {socket.gethostname()}")


def report_error(error: Exception | str, folder: Path | None = None) -> None:
    """Say why the run ends: once a host if its ranks all raise the same, else from the rank that raises it.

    The first rank of a host stores its text; another one speaks unless it finds the same there soon. (A
    collective would not do: the others may be waiting in one of their own.)
    """
    rank, text = _rank(), str(error)
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    store = _store()
    if rank != first and (store is None or _was_reported(store, first, text)):
        stand_aside()
        return
    said = f"fsdmoe: {f'rank {rank}: ' if rank else ''}{text}"
    if folder is not None:
        _keep(said, folder)
    if not _write_error_file(said):
        print(said, file=sys.stderr, flush=True)
    if store is not None:
        with suppress(RuntimeError):  # gone with rank 0
            store.set(f"{_REPORT_KEY}{rank}", text)


def report_crash(error: Exception, step: int, folder: Path | None = None) -> None:
    """As :func:`report_error`, for an error that nobody expected and whose traceback will be printed."""
    where = f" in step {step}" if step else " before the first step"
    advice = "the traceback stands above"
    if isinstance(error, torch.OutOfMemoryError):
        advice = (
            "lower train.micro_batch_size or data.seq_len, set train.recompute = layer or fsdp.cpu_offload, "
            "or use more ranks (docs/faq.md)"
        )
    report_error(f"{type(error).__name__}{where}: {error}; {advice}", folder)


def report_lost_peer(message: str, folder: Path | None = None) -> None:
    """As :func:`report_error`, after the launcher had time to show the failure that this one follows from."""
    _write_error_file(message, is_first=False)
    stand_aside()
    report_error(message, folder)


def stand_aside() -> None:
    """Give the launcher time to end this rank, so that it shows the failure of the one that spoke."""
    if _has_launcher():
        time.sleep(_ASIDE_SECONDS)


def lost_peer_message(error: BaseException, step: int) -> str | None:
    """A line for the user when ``error`` is what a dead or hung rank looks like from here; none otherwise."""
    if not _is_lost_peer(error):
        return None
    ended = _ended_ranks()
    cause = "; ".join(ended) if ended else "it has died or hangs; what it printed, if anything, is the cause"
    return (
        f"rank {_rank()} lost contact with another rank in step {step}: {cause}. This rank stops too; seen "
        f"here: {error}"
    )


def _is_lost_peer(error: BaseException) -> bool:
    """Only what the transport itself reports: gloo's sockets (a plain ``RuntimeError`` that names its source
    file), NCCL, or the store. The same words from a download or a user's own code are not it."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error)
    is_transport = isinstance(error, dist.DistBackendError) or "gloo/transport/" in text
    return is_transport and _GONE.search(text) is not None


def _ended_ranks() -> list[str]:
    """The ranks that are known to have ended, and why; of other hosts only those that said so."""
    store, found = _store(), []
    if store is None:
        return []
    with suppress(RuntimeError):  # gone with rank 0
        for rank in range(dist.get_world_size()):
            if rank == _rank():
                continue
            if store.check([f"{_REPORT_KEY}{rank}"]):
                found.append(f"rank {rank} ended with: {store.get(f'{_REPORT_KEY}{rank}').decode()}")
            elif store.check([f"{_PROCESS_KEY}{rank}"]):
                pid, host = store.get(f"{_PROCESS_KEY}{rank}").decode().split()
                if host == socket.gethostname() and not _is_alive(int(pid)):
                    found.append(
                        f"rank {rank} (pid {pid}) was killed, most probably by the kernel for want of host "
                        "memory (`dmesg` says so)"
                    )
    return found


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _was_reported(store: dist.Store, rank: int, text: str) -> bool:
    try:
        store.wait([f"{_REPORT_KEY}{rank}"], datetime.timedelta(seconds=_REPORT_SECONDS))
        return store.get(f"{_REPORT_KEY}{rank}").decode() == text
    except RuntimeError:  # nothing there in time, or the store is gone with rank 0
        return False


def _write_error_file(text: str, *, is_first: bool = True) -> bool:
    """Whether there is such a file. The launcher takes the earliest of its ranks' for the root cause: what
    only follows from another failure is dated later."""
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return False
    extra = {"timestamp": str(int(time.time()) + (0 if is_first else _LATER_SECONDS))}
    try:
        whole = Path(f"{path}.{os.getpid()}")
        whole.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        whole.replace(path)  # killed in the middle, a rank must not have half a file
    except OSError:
        return False
    return True


def _keep(text: str, folder: Path) -> None:
    with suppress(OSError), (folder / ERRORS).open("a") as file:
        file.write(f"{datetime.datetime.now().isoformat(' ', 'seconds')} {text}\n")


def _store() -> dist.Store | None:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _has_launcher() -> bool:
    return _ERROR_FILE in os.environ


def shutdown(code: int) -> int:
    """Destroy the process group when the run ended normally (NCCL warns otherwise) and return ``code``.

    After a failure it is kept: destroying it may wait for ranks that never join.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    return code
