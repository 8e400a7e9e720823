"""What a rank says when it fails, and to whom.

The text goes to the terminal at once, and the run's folder keeps it. A launcher (torchrun) gives every rank
an error file, and shows the text of the earliest as the root cause, behind a page of its own.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

ERRORS = "errors.txt"
"""In a run's folder: what its ranks said when they failed."""

TRY_AGAIN = 75
"""Exit code of a rank after which the run may be started again (``EX_TEMPFAIL``): a hang or a silent node, or
the end of another node of an elastic run."""

_REPORT_KEY, _PROCESS_KEY = "fsdmoe/error-of-rank-", "fsdmoe/process-of-rank-"
_REPORT_SECONDS = 2.0
_ASIDE_SECONDS = 20.0
_RESTART_ASIDE_SECONDS = 1.0
"""Where the launcher restarts ranks: the one that was lost may be another node's, of which it never hears."""
_POLL_SECONDS = 0.05
_LATER_SECONDS = 3600
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# The errors of a connection whose other end is gone or silent. Backends raise many others (sizes that do not
# match, a device used twice): those are bugs of this run and need their traceback.
_GONE = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|timed out|timeout"
    r"|remote process exit|ncclremoteerror",
    re.IGNORECASE,
)


def expect_kill() -> None:
    """Put into the error file what cannot be written afterwards: why a rank ended that was killed."""
    write_error_file(
        f"rank {own_rank()} ended without a message of its own. Exit code -9 (SIGKILL): somebody killed it, "
        "or the kernel did for want of host memory (`dmesg` says so; then start fewer ranks on this host, "
        "lower data.num_workers or set checkpoint.asynchronous = false). Others: a crash inside of a library"
    )


def register_rank() -> None:
    """Let the other ranks know which process this one is, so that they can say which one has died."""
    store = _store()
    if store is not None:
        store.set(f"{_PROCESS_KEY}{own_rank()}", f"{os.getpid()} {process_space()}")


def report_error(error: Exception | str, folder: Path | None = None, received: Sequence[int] = ()) -> None:
    """Say why the run ends: once a host if its ranks all raise the same, else from the rank that raises it.

    The first rank of a host stores its text; another one speaks unless it finds the same there soon. (A
    collective would not do: the others may be waiting in one of their own.) Before ranks have met, and
    without a launcher, another one says its first line. ``received``: the signals caught
    so far, where they are caught.
    """
    rank, text = own_rank(), str(error)
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    store = _store()
    said = f"fsdmoe: {f'rank {rank}: ' if rank else ''}{text}"
    if rank != first and store is None and has_launcher():
        _follow_first(first)
        if stand_aside(received):  # the first rank of the host failed too
            return
    elif rank != first and store is None:  # nobody can tell whether the first rank has said it: in short
        said = said.partition("\n")[0]
    elif rank != first and store is not None and _was_reported(store, first, text):
        _follow_first(first)
        stand_aside(received)
        return
    if folder is not None:
        keep(said, folder)
    write_error_file(said)
    print(said, file=sys.stderr, flush=True)  # now: the launcher shows it after a page of its own
    if store is not None:
        with suppress(RuntimeError):  # gone with rank 0
            store.set(f"{_REPORT_KEY}{rank}", text)


def report_crash(
    error: Exception, step: int, folder: Path | None = None, received: Sequence[int] = ()
) -> None:
    """As :func:`report_error`, for an error that nobody expected and whose traceback will be printed."""
    where = f" in step {step}" if step else " before the first step"
    advice = "see its traceback"
    import torch  # not above: a refused configuration ends before it is loaded

    if isinstance(error, torch.OutOfMemoryError):
        advice = (
            'lower train.micro_batch_size or data.seq_len, set memory.recompute = ["layer"] or '
            "fsdp.cpu_offload, or use more ranks (docs/faq.md)"
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = Path(error.filename).parent if isinstance(error.filename, str) else folder
        advice = f"{free_some(place or Path())}, or name another train.output_dir"
    report_error(f"{type(error).__name__}{where}: {error}; {advice}", folder, received)


def free_some(folder: Path) -> str:
    """What to do about a full disk, which may lack files that it can name (inodes) instead of space."""
    with suppress(OSError):
        facts = os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))
        if facts.f_files and not facts.f_favail and facts.f_bavail:
            return f"delete some files in {folder}, whose disk has space but no inodes left (df -i)"
    return f"free some space in {folder}"


def report_lost_peer(message: str, folder: Path | None = None, received: Sequence[int] = ()) -> None:
    """As :func:`report_error`, after the launcher had time to show the failure that this one follows from."""
    write_error_file(message, is_first=False)
    if folder is not None:
        keep(message, folder)
    if not stand_aside(received):
        report_error(message, received=received)


def stand_aside(received: Sequence[int]) -> bool:
    """Give the launcher time to end this rank, so that it shows the failure of the one that spoke.

    Where signals are caught, the launcher's arrives in ``received``: returns whether one has.
    """
    seconds = _ASIDE_SECONDS if not will_restart() else _RESTART_ASIDE_SECONDS
    deadline = time.monotonic() + (seconds if has_launcher() else 0)
    while not received and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return bool(received)


def lost_peer_message(error: BaseException, step: int) -> str | None:
    """A line for the user when ``error`` is what a dead or hung rank looks like from here; none otherwise."""
    if not _is_lost_peer(error):
        return None
    ended = _ended_ranks()
    cause = "; ".join(ended) if ended else "it has died or hangs; what it printed, if anything, is the cause"
    return (
        f"rank {own_rank()} lost contact with another rank in step {step}: {cause}. This rank stops too; "
        f"seen here: {error}"
    )


def _is_lost_peer(error: BaseException) -> bool:
    """Only what the transport itself reports: gloo's sockets (a plain ``RuntimeError`` that names its source
    file), NCCL, or the store. The same words from a download or a user's own code are not it."""
    import torch.distributed as dist  # not above: a refused configuration ends before it is loaded

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
        for rank in range(sys.modules["torch.distributed"].get_world_size()):
            if rank == own_rank():
                continue
            if store.check([f"{_REPORT_KEY}{rank}"]):
                found.append(f"rank {rank} ended with: {store.get(f'{_REPORT_KEY}{rank}').decode()}")
            elif store.check([f"{_PROCESS_KEY}{rank}"]):
                pid, host = store.get(f"{_PROCESS_KEY}{rank}").decode().split()
                if host == process_space() and not is_alive(int(pid)):
                    found.append(
                        f"rank {rank} (pid {pid}) has ended without a message: killed, by somebody or by the "
                        "kernel for want of host memory (`dmesg` says so), or crashed inside of a library"
                    )
    return found


def process_space() -> str:
    """The host, and the namespace in which a pid of it means something."""
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs. One that has ended and waits for its parent does not."""
    if not Path("/proc/self/stat").exists():
        with suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return True
    facts = _facts_of(pid)
    return bool(facts) and facts[0] not in "ZX"


def began(pid: int) -> str:
    """When a process of this host began, by its kernel's clock; empty where the system does not say."""
    facts = _facts_of(pid)
    return facts[19] if facts else ""


def started_at() -> float | None:
    """When this start of a run began, in seconds since 1970: its launcher's process where that has started
    ranks once, else this one. None where the system does not say."""
    is_first = has_launcher() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    ticks = began(os.getppid() if is_first else os.getpid())
    if not ticks:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _facts_of(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _was_reported(store: dist.Store, rank: int, text: str) -> bool:
    try:
        store.wait([f"{_REPORT_KEY}{rank}"], datetime.timedelta(seconds=_REPORT_SECONDS))
        return store.get(f"{_REPORT_KEY}{rank}").decode() == text
    except RuntimeError:  # nothing there in time, or the store is gone with rank 0
        return False


def _follow_first(first: int) -> None:
    """In case the launcher ends this rank while it stands aside."""
    write_error_file(f"rank {own_rank()} ended as rank {first} did, whose message is shown", is_first=False)


def write_error_file(text: str, *, is_first: bool = True) -> bool:
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


def keep(text: str, folder: Path) -> None:
    """Append to the run's file of errors, if that is possible."""
    with suppress(OSError), (folder / ERRORS).open("a") as file:
        file.write(f"{datetime.datetime.now().isoformat(' ', 'seconds')} {text}\n")


def _store() -> dist.Store | None:
    """Of the process group; none before torch is loaded."""
    if "torch.distributed" not in sys.modules:
        return None
    dist = sys.modules["torch.distributed"]
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def own_rank() -> int:
    """This process's, known before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def will_restart() -> bool:
    """Whether the launcher starts ranks again that have failed."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def has_launcher() -> bool:
    """Whether torchrun waits for this rank."""
    return _ERROR_FILE in os.environ


def launch_id(environment: Mapping[str, str] = os.environ) -> str:
    """What torchrun calls its rendezvous (``--rdzv-id``), which all of its restarts share; empty without."""
    found = environment.get("TORCHELASTIC_RUN_ID", "")
    return "" if found == "none" else found  # torchrun's own word where none is named
