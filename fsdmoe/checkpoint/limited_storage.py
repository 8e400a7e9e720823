"""A storage with limits: an operation whose failure may pass is tried again, one that hangs is given up.

A call into a file system or a driver that hangs cannot be ended. It runs in a thread of its own, and is left
behind there: the save or load that asked for it fails, and the run goes on with it or ends as with any other
failure. What such a call may still do later never makes half a checkpoint visible:

=============================  ==========================================================================
left behind in                 if it goes on later
=============================  ==========================================================================
the write of a file            the file is in a folder that is removed, or that nobody sees; a run does
                               not use the name of a save that failed again
making a checkpoint visible    all its files are there, so it appears whole: they are not removed then. In a
                               store the next save sweeps them away; a marker alone is no checkpoint
a deletion                     what it deletes is invisible already
a read                         the load has failed on all ranks
=============================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from fsdmoe.checkpoint.agree import world
from fsdmoe.checkpoint.config import CheckpointConfig
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.object_storage import ObjectStorage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PASSING = {
    errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO,
    errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ENOTCONN, errno.EPIPE, errno.ENETDOWN,
    errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOBUFS, errno.ENOLCK,
}  # fmt: skip
"""What a network file system or a busy server says. A full disk or a missing permission does not pass."""
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_PASSING_STATUS = (408, 429)  # HTTP: too slow, too many requests; and all of the server's own, from 500 on
_LOOKS = 10
"""At an operation, in the time that it may hang."""
_PIECE_BYTES = 64 << 20
_MAX_PAUSE = 30.0


class HungStorageError(CheckpointError):
    """An operation of a storage has made no progress for too long."""


class Waits:
    """How time passes; tests have another."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def until(self, done: threading.Event, seconds: float) -> bool:
        """Whether it was done in this time."""
        return done.wait(seconds)


@dataclass(frozen=True)
class Limits:
    """Of one operation."""

    retries: int = CheckpointConfig.retries
    hang_seconds: float = CheckpointConfig.hang_seconds
    """0: none."""
    waits: Waits = field(default_factory=Waits)


class LimitedStorage:
    """What each method does is said by :class:`LocalStorage`."""

    def __init__(self, inner: LocalStorage | ObjectStorage, limits: Limits) -> None:
        self.inner = inner
        self.root = inner.root
        self._limits = limits
        self._pauses = random.Random()  # not the run's numbers: ranks that fail together try again apart
        self._hung_commits: set[str] = set()

    def begin(self, name: str, *, replaces: bool = False) -> None:
        self._run("begin", name, lambda: self.inner.begin(name, replaces=replaces))

    def write(self, name: str, file: str, fill: Callable[[Any], T]) -> T:
        """``fill`` is called once an attempt."""

        def write(work: _Work[T]) -> T:
            return self.inner.write(name, file, lambda handle: fill(_Counted(handle, work)))

        return self._try("write", f"{name}/{file}", write)

    def written_size(self, name: str, file: str) -> int | None:
        return self._run("look", f"{name}/{file}", lambda: self.inner.written_size(name, file))

    def commit(self, name: str) -> None:
        try:
            self._run("commit", name, lambda: self.inner.commit(name))
        except HungStorageError:
            self._hung_commits.add(name)
            raise

    def discard(self, name: str) -> None:
        if name in self._hung_commits:
            logger.error(
                "%s/%s: its files stay, since making them visible may still succeed", self.root, name
            )
            return
        with contextlib.suppress(Exception):  # the save has failed of another error, which is the one to tell
            self._run("discard", name, lambda: self.inner.discard(name))

    def names(self) -> list[str]:
        return self._run("list", "", self.inner.names)

    def size(self, name: str, file: str) -> int | None:
        return self._run("look", f"{name}/{file}", lambda: self.inner.size(name, file))

    def read_into(self, name: str, file: str, at: int, buffers: Sequence[memoryview]) -> None:
        self._run("read", f"{name}/{file}", lambda: self.inner.read_into(name, file, at, buffers))

    def delete(self, name: str) -> None:
        self._run("delete", name, lambda: self.inner.delete(name))

    def sweep(self) -> list[str]:
        return self._run("sweep", "", self.inner.sweep)

    def point_at(self, name: str) -> None:
        self._run("point latest at", name, lambda: self.inner.point_at(name))

    def pointed_at(self) -> str | None:
        return self._run("read latest", "", self.inner.pointed_at)

    def recover(self) -> None:
        self._run("recover", "", self.inner.recover)

    def tidy(self) -> None:
        self._run("tidy", "", self.inner.tidy)

    def free_bytes(self) -> int | None:
        return self._run("free space", "", self.inner.free_bytes)

    def _run(self, operation: str, what: str, act: Callable[[], T]) -> T:
        return self._try(operation, what, lambda _: act())

    def _try(self, operation: str, what: str, act: Callable[[_Work[T]], T]) -> T:
        named = f"{operation} {self.root}/{what}".rstrip("/")
        for attempt in itertools.count(1):
            try:
                return _Work(act).within(self._limits, f"rank {world()[0]}: {named}")
            except Exception as error:
                if attempt > self._limits.retries or not may_pass(error, is_remote=self.inner.is_remote):
                    raise
                pause = min(_MAX_PAUSE, 2.0 ** (attempt - 1)) * self._pauses.uniform(0.5, 1.5)
                # an error: less is not shown of other ranks than the first
                logger.error(
                    "rank %d: %s failed, attempt %d of %d; again in %.1f s: %s: %s",
                    world()[0],
                    named,
                    attempt,
                    self._limits.retries + 1,
                    pause,
                    type(error).__name__,
                    error,
                )
                self._limits.waits.sleep(pause)
        raise AssertionError("unreachable")


class _Work(Generic[T]):
    """One attempt at an operation, and how far it is."""

    def __init__(self, act: Callable[[_Work[T]], T]) -> None:
        self._act = act
        self._done = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.num_pieces = 0

    def within(self, limits: Limits, named: str) -> T:
        """The result; :class:`HungStorageError` where there is none for too long, and no progress either."""
        if not limits.hang_seconds:
            return self._act(self)
        # a daemon: the interpreter does not wait for it at its end
        threading.Thread(target=self._run, name="checkpoint-storage", daemon=True).start()
        quiet = seen = 0
        while not limits.waits.until(self._done, limits.hang_seconds / _LOOKS):
            quiet = quiet + 1 if self.num_pieces == seen else 0
            seen = self.num_pieces
            if quiet == _LOOKS:
                raise HungStorageError(
                    f"{named} has made no progress for {limits.hang_seconds:g} s and is given up "
                    "(checkpoint.hang_seconds)"
                )
        if self._error is None:
            return self._results[0]
        try:
            raise self._error
        finally:
            self._error = None  # its traceback holds this frame: what was to be written would live on

    def _run(self) -> None:
        try:
            with torch.no_grad():  # a setting of each thread
                self._results.append(self._act(self))
        except BaseException as error:  # raised again by the thread that asked
            self._error = error
        finally:
            self._done.set()


class _Counted:
    """A file that is written in pieces, each of which is progress."""

    def __init__(self, handle: Any, work: _Work[Any]) -> None:
        self._handle = handle
        self._work = work

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE_BYTES):
            self._handle.write(view[at : at + _PIECE_BYTES])
            self._work.num_pieces += 1
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def may_pass(error: BaseException | None, *, is_remote: bool) -> bool:
    """Whether the same operation may succeed a moment later. Drivers of object stores (``is_remote``) raise
    errors of their own kinds."""
    if isinstance(error, DamagedCheckpointError):
        error = error.__cause__  # a file that could not be read
    if isinstance(error, OSError):
        if error.errno is None:
            is_lost = isinstance(error, (ConnectionError, TimeoutError))
            return is_lost or (is_remote and not isinstance(error, _FINAL))
        return error.errno in _PASSING
    own = ("builtins", "torch", "fsdmoe")
    if error is None or not is_remote or type(error).__module__.partition(".")[0] in own:
        return False
    status = _http_status(error)
    return status is None or status in _PASSING_STATUS or status >= 500


def _http_status(error: BaseException) -> int | None:
    """As the drivers of S3, Google's and Azure's stores keep it."""
    response = getattr(error, "response", None)
    found = [getattr(error, name, None) for name in ("status_code", "status", "code")]
    if isinstance(response, dict):
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next(
        (int(value) for value in found if isinstance(value, (int, str)) and str(value).isdigit()), None
    )
