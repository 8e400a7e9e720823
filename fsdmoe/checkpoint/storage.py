"""Where checkpoint folders live: a local (shared) file system, or an object store through fsspec.

A checkpoint is invisible until it is whole. On a file system it is written under a hidden name, flushed,
and renamed; an object store cannot rename, so a marker object is written last and only folders with a
marker count. Deleting goes the other way round: first invisible, then gone. ``latest`` names the newest
checkpoint for people and scripts.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import LATEST, MANIFEST
from fsdmoe.checkpoint.object_storage import ObjectStorage

StrPath = str | os.PathLike[str]
_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_WRITE_BUFFER = 4 << 20
_MAX_BUFFERS = 512  # of one system call


def open_storage(address: StrPath) -> Storage:
    """``s3://…`` and other fsspec addresses, or a folder."""
    text = os.fspath(address)
    if "://" in text:
        return ObjectStorage(text)
    return LocalStorage(text)


def read_file(storage: Storage, name: str, file: str) -> bytes:
    size = storage.size(name, file)
    if size is None:
        raise DamagedCheckpointError(f"{name}/{file}", "missing")
    data = bytearray(size)
    storage.read_into(name, file, 0, [memoryview(data)])
    return bytes(data)


class LocalStorage:
    """A folder on a file system that all ranks share."""

    def __init__(self, root: StrPath) -> None:
        self.root = os.fspath(Path(root).expanduser())
        self._path = Path(self.root)

    def begin(self, name: str, *, replaces: bool = False) -> None:
        """Make an empty, invisible folder for ``name``. ``replaces``: also where there is another than a
        checkpoint."""
        final = self._path / name
        if final.exists() and not (replaces or (final / MANIFEST).is_file() or _is_empty(final)):
            raise CheckpointError(
                f"{final}: expected a folder to make, got one with other files, which are not replaced; "
                "choose another path, or remove it first"
            )
        folder = self._path / f"{_SAVING}{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        """Open a new file of the folder being written; durable when the context ends without an error."""
        path = self._path / f"{_SAVING}{name}" / file
        with open(path, "xb", buffering=_WRITE_BUFFER) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())

    def commit(self, name: str) -> None:
        """Make what was written visible, all of it at once."""
        ready, final = self._path / f"{_SAVING}{name}", self._path / name
        _sync_folder(ready)
        aside = self._path / f"{_REPLACED}{name}"
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        ready.rename(final)
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
        going = self._path / f"{_DELETING}{name}"
        shutil.rmtree(going, ignore_errors=True)
        (self._path / name).rename(going)
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


Storage = LocalStorage | ObjectStorage
"""The folder that holds a run's checkpoints; what each method does is said by :class:`LocalStorage`."""


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def split_address(path: StrPath) -> tuple[Storage, str]:
    """The storage that holds a checkpoint folder, and the folder's name in it."""
    text = os.fspath(path).rstrip("/")
    parent, _, name = text.rpartition("/")
    if "://" not in text:
        absolute = Path(text).expanduser().absolute()
        parent, name = str(absolute.parent), absolute.name
    if not name or name.startswith(".") or not parent:
        raise CheckpointError(
            f"{text!r}: expected the path of a checkpoint folder; its name cannot start with a dot"
        )
    return open_storage(parent), name
