"""Build a folder once, however many processes ask for it at the same time.

lock   <key>.lock      held while building (the kernel releases it when a process dies: no stale locks)
build  <key>.building  removed first if a killed process left one
rename <key>           the folder appears whole or not at all
fail   <key>.failed    the message, for those who waited: they must not repeat a long build only to fail alike
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.failures import free_some
from fsdmoe.data.store import META, read_meta

_POLL_SECONDS = 0.1
_SAY_WAITING_AFTER = 5.0
SAY_EVERY_SECONDS = 5.0
"""Between two lines that say how far a long build is."""


def cache_folder(cache_dir: str) -> Path:
    """Where tokenised sources are kept."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdmoe" / "data"


def open_or_build(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The whole folder `root / key`, built by one process while the others wait."""
    folder = root / key
    if read_meta(folder) is not None:
        return folder
    asked_at = time.time()
    with naming_full_disk(root):
        (root / f"{key}.lock").touch()
    with _lock(root / f"{key}.lock", key) as waited:
        if read_meta(folder) is not None:
            return folder
        failed = root / f"{key}.failed"
        if waited and failed.exists() and failed.stat().st_mtime >= asked_at - 1.0:
            raise ConfigError(*failed.read_text().splitlines())
        failed.unlink(missing_ok=True)
        try:
            with naming_full_disk(root):
                _build(folder, root / f"{key}.building", build)
        except ConfigError as error:
            with suppress(OSError):  # on a full disk those who waited find it out themselves
                failed.write_text(str(error))
            raise
    return folder


@contextmanager
def naming_full_disk(root: Path) -> Iterator[None]:
    """What cannot be written for want of space is said with the key that says where it goes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = f"{free_some(root)}, or set another"
        raise ConfigError(f"data.cache_dir: no space left in {root}; {fix}") from error


def _build(folder: Path, partial: Path, build: Callable[[Path], None]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        if not (partial / META).exists():
            raise AssertionError("a build must end by writing its description")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(path: Path, key: str) -> Iterator[bool]:
    """Hold an exclusive lock; yields whether another process held it before."""
    waited, since, said = False, time.monotonic(), False
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = True
            except OSError as error:
                raise ConfigError(
                    f"data.cache_dir: {path.parent} is on a file system without locks ({error.strerror}); "
                    "set it to a local folder"
                ) from error
            if not said and time.monotonic() - since > _SAY_WAITING_AFTER:
                said = True
                say(f"waiting for another process to tokenise {key}")
            time.sleep(_POLL_SECONDS)
        yield waited


def say(line: str) -> None:
    """One line to the user, on the error stream so that it never mixes with a program's output."""
    print(f"data: {line}", file=sys.stderr, flush=True)
