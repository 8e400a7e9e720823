"""Checkpoints on a file system.

A checkpoint is invisible until it is whole: it is written under a hidden name, flushed, and renamed. Deleting
goes the other way round: first invisible, then gone.

=====================  ==========================================================================
``.saving-NAME``       being written, or left behind by a crash; removed by the next save
``NAME``               whole
``.replaced-NAME``     an older NAME, moved aside while its successor is put in place
``.deleting-NAME``     on its way out; what could not be removed is tried again after the next save
=====================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import LATEST, MANIFEST

T = TypeVar("T")
StrPath = str | os.PathLike[str]
_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_WRITE_BUFFER = 4 << 20
_SYNC_BYTES = 256 << 20
_MAX_BUFFERS = 512  # of one system call


class LocalStorage:
    """A folder on a file system that all ranks share. Each method may be called again after it has failed."""

    is_remote = False

    def __init__(self, root: StrPath) -> None:
        self.root = os.fspath(Path(root).expanduser())
        self._path = Path(self.root)
        self._renamed: set[str] = set()
        """Committed by this object: a second commit, after the first failed behind its rename, only syncs."""

    def begin(self, name: str, *, replaces: bool = False) -> None:
        """Make an empty, invisible folder for ``name``. ``replaces``: also where there is another than a
        checkpoint."""
        final = self._path / name
        if final.exists() and not (replaces or (final / MANIFEST).is_file() or _is_empty(final)):
            raise CheckpointError(
                f"{final}: expected a folder to make, got one with other files, which are not replaced; "
                "choose another path, or remove it first"
            )
        self._renamed.discard(name)
        folder = self._path / f"{_SAVING}{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def write(self, name: str, file: str, fill: Callable[[Any], T]) -> T:
        """Make a file of the folder being written with what ``fill`` writes into it; durable when this
        returns."""
        with self.create(name, file) as handle:
            return fill(handle)

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        """Open a new file of the folder being written, in place of what an attempt that failed has left of
        it; durable when the context ends without an error."""
        path = self._path / f"{_SAVING}{name}" / file
        with open(path, "wb", buffering=_WRITE_BUFFER) as handle:
            yield _Syncing(handle)
            handle.flush()
            os.fsync(handle.fileno())

    def written_size(self, name: str, file: str) -> int | None:
        """As :meth:`size`, of the folder being written."""
        return self.size(f"{_SAVING}{name}", file)

    def commit(self, name: str) -> None:
        """Make what was written visible, all of it at once."""
        ready, final = self._path / f"{_SAVING}{name}", self._path / name
        aside = self._path / f"{_REPLACED}{name}"
        if name not in self._renamed:
            _sync_folder(ready)
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            ready.rename(final)
            self._renamed.add(name)
        _sync_folder(self._path)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self, name: str) -> None:
        """Delete what was written before it was committed."""
        shutil.rmtree(self._path / f"{_SAVING}{name}", ignore_errors=True)

    def names(self) -> list[str]:
        """The whole checkpoints, in no order."""
        if not self._path.is_dir():
            return []
        return [
            entry.name for entry in os.scandir(self._path)
            if entry.is_dir() and not entry.name.startswith(".") and (Path(entry.path) / MANIFEST).is_file()
        ]  # fmt: skip

    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file; None when it is not there."""
        try:
            return self._file(name, file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_into(self, name: str, file: str, at: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after another from byte ``at``; :class:`DamagedCheckpointError` when the file
        ends before."""
        try:
            handle = os.open(self._file(name, file), os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpointError(f"{name}/{file}", f"cannot be opened: {error.strerror}") from error
        try:
            left = [buffer for buffer in buffers if len(buffer)]
            while left:
                count = os.preadv(handle, left[:_MAX_BUFFERS], at)
                if count == 0:
                    raise DamagedCheckpointError(f"{name}/{file}", f"truncated: it ends at byte {at}")
                at += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except OSError as error:
            raise DamagedCheckpointError(f"{name}/{file}", f"cannot be read: {error.strerror}") from error
        finally:
            os.close(handle)

    def _file(self, name: str, file: str) -> Path:
        return self._path / name / file

    def delete(self, name: str) -> None:
        """Make a checkpoint invisible, then remove it; ``OSError`` when some of it is still there."""
        whole, going = self._path / name, self._path / f"{_DELETING}{name}"
        if whole.exists():
            shutil.rmtree(going, ignore_errors=True)
            whole.rename(going)
        if going.exists():
            shutil.rmtree(going)

    def sweep(self) -> list[str]:
        """Try again to remove what a failed deletion left; the folders of which some is still there. For
        the one who writes, between saves."""
        left = list(self._path.glob(f"{_DELETING}*"))
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return sorted(folder.name for folder in left if folder.exists())

    def point_at(self, name: str) -> None:
        """Let ``latest`` name a whole checkpoint."""
        fresh = self._path / f".{LATEST}"
        with open(fresh, "w", encoding="utf-8") as handle:
            handle.write(name + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(self._path / LATEST)
        _sync_folder(self._path)

    def pointed_at(self) -> str | None:
        """What ``latest`` names; None where there is none."""
        try:
            return (self._path / LATEST).read_text(encoding="utf-8").strip() or None
        except (FileNotFoundError, UnicodeDecodeError, IsADirectoryError):
            return None

    def recover(self) -> None:
        """Put back what was moved aside when its successor never arrived."""
        for aside in self._path.glob(f"{_REPLACED}*"):
            final = self._path / aside.name.removeprefix(_REPLACED)
            if not final.exists():
                aside.rename(final)

    def tidy(self) -> None:
        """Remove what crashes left behind. For the one who writes: another's save in progress would go
        too."""
        self.recover()
        for prefix in (_SAVING, _REPLACED, _DELETING):
            for left in self._path.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)

    def free_bytes(self) -> int | None:
        """Space left; None where there is no limit to ask for."""
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize


class _Syncing:
    """A file whose bytes go to the disk while it is written. Otherwise all of a large file would wait in the
    page cache, and its last fsync would look like a hang."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._since = 0

    def write(self, data: memoryview | bytes) -> int:
        count = self._handle.write(data)
        self._since += count
        if self._since >= _SYNC_BYTES:
            self._handle.flush()
            os.fdatasync(self._handle.fileno())
            self._since = 0
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
