"""Checkpoints in an object store, through fsspec. Its methods do what those of
:class:`fsdmoe.checkpoint.local_storage.LocalStorage` do.

fsspec's own ``exists`` is not used: it answers no to every error, and a checkpoint whose marker could not be
asked for would be passed over, or swept away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fsdmoe.checkpoint.addresses import open_address
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import BEGUN, LATEST, MANIFEST, MARKER, METADATA, parse_manifest

T = TypeVar("T")


class ObjectStorage:
    """No rename, no fsync: an object exists once its upload is done; a marker object says that all are."""

    is_remote = True

    def __init__(self, address: str) -> None:
        self._fs, self._root = open_address(address)
        self.root = address
        self._whole: set[str] = set()
        """Folders without a marker that were found whole."""

    def begin(self, name: str, *, replaces: bool = False) -> None:
        if not replaces and self.size(name, MARKER) is not None:
            raise CheckpointError(
                f"{self.root}/{name} exists and an object store cannot replace it at once; delete it"
            )
        self.delete(name)
        self._fs.pipe_file(self._at(name, BEGUN), b"until COMMITTED is there, this is a part\n")

    def write(self, name: str, file: str, fill: Callable[[Any], T]) -> T:
        with self.create(name, file) as handle:
            return fill(handle)

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        handle = self._fs.open(self._at(name, file), "wb")
        try:
            yield handle
        except BaseException:
            with contextlib.suppress(Exception):
                handle.discard()  # do not finish a broken upload
            raise
        handle.close()

    def written_size(self, name: str, file: str) -> int | None:
        return self.size(name, file)

    def commit(self, name: str) -> None:
        self._fs.pipe_file(self._at(name, MARKER), b"whole\n")
        self._fs.invalidate_cache()

    def discard(self, name: str) -> None:
        with contextlib.suppress(Exception):  # the next save's tidy() sees what is left
            if self.size(name, MARKER) is None:  # what is whole was not begun by the failed save
                self._remove(name)

    def names(self) -> list[str]:
        found = [path.rsplit("/", 1)[-1] for path, is_whole in self._folders() if is_whole]
        # a marker whose upload was given up may be done when the files are gone again
        return [name for name in found if self.size(name, MANIFEST) is not None]

    def size(self, name: str, file: str) -> int | None:
        return self._size(self._at(name, file))

    def _size(self, path: str) -> int | None:
        try:
            return int(self._fs.info(path)["size"])
        except FileNotFoundError:
            return None

    def read_into(self, name: str, file: str, at: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        try:
            data = self._fs.cat_file(self._at(name, file), start=at, end=at + wanted)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{name}/{file}", "missing") from error
        if len(data) != wanted:
            raise DamagedCheckpointError(f"{name}/{file}", f"truncated: it ends at byte {at + len(data)}")
        done = 0
        for buffer in buffers:
            buffer[:] = data[done : done + len(buffer)]
            done += len(buffer)

    def delete(self, name: str) -> None:
        self._whole.discard(self._at(name))
        for file in (MARKER, MANIFEST):  # first: what is left of it is no checkpoint
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name, file))
        self._remove(name)

    def sweep(self) -> list[str]:
        left = []
        for path, is_whole in self._folders():
            if is_whole or not _ours(self._fs, path):
                continue  # not what a save or a deletion that ended early left
            try:
                self._fs.rm(path, recursive=True)
            except Exception:  # drivers raise errors of their own kinds
                left.append(path.rsplit("/", 1)[-1])
        return left

    def point_at(self, name: str) -> None:
        self._fs.pipe_file(self._at(LATEST), (name + "\n").encode())

    def pointed_at(self) -> str | None:
        try:
            return self._fs.cat_file(self._at(LATEST)).decode().strip() or None
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def recover(self) -> None:
        pass  # nothing is ever moved

    def tidy(self) -> None:
        self.sweep()

    def free_bytes(self) -> int | None:
        return None

    def _folders(self) -> list[tuple[str, bool]]:
        """Paths, and whether all is there."""
        self._fs.invalidate_cache()
        try:
            listed = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        paths = [entry["name"].rstrip("/") for entry in listed if entry["type"] == "directory"]
        return [(path, self._is_whole(path)) for path in paths]

    def _is_whole(self, path: str) -> bool:
        """By its marker. One that was copied here by other means has none, nor is it said to be begun: it is
        whole once the files of its manifest are there."""
        if path in self._whole or self._size(f"{path}/{MARKER}") is not None:
            return True
        found = self._fs.find(path, detail=True)
        sizes = {file.rsplit("/", 1)[-1]: facts["size"] for file, facts in found.items()}
        if BEGUN in sizes or MANIFEST not in sizes:
            return False
        try:
            files, _, _ = parse_manifest(self._fs.cat_file(f"{path}/{MANIFEST}"), path)
        except (FileNotFoundError, DamagedCheckpointError):
            return False
        if any(sizes.get(file) != record.num_bytes for file, record in files.items()):
            return False
        self._whole.add(path)  # such a folder is looked at once
        return True

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)
        self._fs.invalidate_cache()


def _ours(fs: Any, path: str) -> bool:
    """Only folders that a save has begun, with nothing but its files, are removed: a mistyped address deletes
    no other data, and a copy that is on its way here stays."""
    files = [entry.rsplit("/", 1)[-1] for entry in fs.find(path)]
    known = (BEGUN, MANIFEST, METADATA)
    return BEGUN in files and all(file in known or file.startswith("data-") for file in files)
