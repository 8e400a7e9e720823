"""Where checkpoint folders live: a local (shared) file system, or an object store through fsspec.

A checkpoint is invisible until it is whole (how: :mod:`fsdmoe.checkpoint.local_storage`,
:mod:`fsdmoe.checkpoint.object_storage`). ``latest`` names the newest for people and scripts. What is opened
here keeps to limits on every operation (:mod:`fsdmoe.checkpoint.limited_storage`).
"""

from __future__ import annotations

import os
from pathlib import Path

from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.limited_storage import LimitedStorage, Limits
from fsdmoe.checkpoint.local_storage import LocalStorage, StrPath
from fsdmoe.checkpoint.object_storage import ObjectStorage

Storage = LocalStorage | ObjectStorage | LimitedStorage
"""The folder that holds a run's checkpoints; what each method does is said by :class:`LocalStorage`."""


def open_storage(address: StrPath, limits: Limits | None = None) -> LimitedStorage:
    """``s3://…`` and other fsspec addresses, or a folder (``file://…`` too)."""
    text = os.fspath(address).removeprefix("file://")
    inner = ObjectStorage(text) if "://" in text else LocalStorage(text)
    return LimitedStorage(inner, limits or Limits())


def read_file(storage: Storage, name: str, file: str) -> bytes:
    size = storage.size(name, file)
    if size is None:
        raise DamagedCheckpointError(f"{name}/{file}", "missing")
    data = bytearray(size)
    storage.read_into(name, file, 0, [memoryview(data)])
    return bytes(data)


def split_address(path: StrPath, limits: Limits | None = None) -> tuple[LimitedStorage, str]:
    """The storage that holds a checkpoint folder, and the folder's name in it."""
    text = os.fspath(path).removeprefix("file://").rstrip("/")
    parent, _, name = text.rpartition("/")
    if "://" not in text:
        absolute = Path(text).expanduser().absolute()
        parent, name = str(absolute.parent), absolute.name
    if not name or name.startswith(".") or not parent:
        raise CheckpointError(
            f"{text!r}: expected the path of a checkpoint folder; its name cannot start with a dot"
        )
    return open_storage(parent, limits), name
