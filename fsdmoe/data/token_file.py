"""A file of token ids, read piece by piece.

Read, not mapped: a page fault on mapped memory holds the interpreter lock while the disk works, so that a
background thread would stall the training loop; a read releases it, and fetches only what it needs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_OPEN_FILES = 128


class _Handle:
    """An open file. Every reader holds a reference, so it is never closed during a read."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


Opener = Callable[[Path], _Handle]


def file_opener() -> Opener:
    """Opens files and keeps those used last open: a source may have more files than a process can open."""
    return functools.lru_cache(maxsize=_MOST_OPEN_FILES)(_Handle)


class TokenFile:
    """A raw array in a file, sliced like an array. Safe to share among threads."""

    def __init__(self, path: Path, dtype: str, opener: Opener, *, header_bytes: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._opener = opener
        self._header_bytes = header_bytes
        self._length = (path.stat().st_size - header_bytes) // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise AssertionError(f"expected a slice without a step, got {part}")
        count = max(stop - start, 0)
        raw = self._read(count * self.dtype.itemsize, self._header_bytes + start * self.dtype.itemsize)
        return np.frombuffer(raw, dtype=self.dtype)

    def _read(self, num_bytes: int, place: int) -> bytes:
        handle = self._opener(self.path)
        raw = os.pread(handle.number, num_bytes, place)
        while len(raw) < num_bytes:  # a very large read, or a file that was cut short meanwhile
            more = os.pread(handle.number, num_bytes - len(raw), place + len(raw))
            if not more:
                raise OSError(f"{self.path} has become shorter than {place + num_bytes} bytes")
            raw += more
        return raw
