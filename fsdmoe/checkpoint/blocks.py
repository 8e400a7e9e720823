"""Checksums by block: a file is a sequence of blocks of equal size, each with its CRC-32.

A reader that needs part of a file verifies exactly the blocks it touches, so loading checks every byte it
uses without reading the rest, and a damaged place is known to the block. ``zlib.crc32`` releases the
interpreter lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    num_bytes: int
    checksums: Sequence[int] | None
    """One a block; None where the origin (a Hugging Face folder) has none."""


class Sink(Protocol):
    """Where bytes go: an open file."""

    def write(self, data: memoryview | bytes, /) -> object: ...


class RunningChecksums:
    """The checksums of bytes that come in parts."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._running = 0
        self._done: list[int] = []
        self.num_bytes = 0

    def add(self, part: memoryview) -> None:
        at = 0
        while at < len(part):
            piece = part[at : at + self._block_bytes - self.num_bytes % self._block_bytes]
            self._running = zlib.crc32(piece, self._running)
            at += len(piece)
            self.num_bytes += len(piece)
            if self.num_bytes % self._block_bytes == 0:
                self._done.append(self._running)
                self._running = 0

    def values(self) -> list[int]:
        """One a block; the last block may be short."""
        return [*self._done, self._running] if self.num_bytes % self._block_bytes else list(self._done)


class BlockWriter:
    """Writes to a file and keeps the checksum of every block."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._checksums = RunningChecksums(BLOCK_BYTES)

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        self._checksums.add(view)
        self._sink.write(view)

    def record(self) -> FileRecord:
        """Of all that was written."""
        return FileRecord(self._checksums.num_bytes, self._checksums.values())


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes)


def pack(checksums: Sequence[int]) -> str:
    """Eight hexadecimal digits a block: small, and readable in the manifest."""
    return "".join(f"{value:08x}" for value in checksums)


def unpack(text: str) -> list[int]:
    return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]


def first_bad_block(
    parts: Sequence[memoryview], start: int, wanted: Sequence[int], block_bytes: int
) -> int | None:
    """Check bytes that lie in several buffers, one after another, and begin at the block boundary ``start``
    of their file; the number of a bad block, or None."""
    found = RunningChecksums(block_bytes)
    for part in parts:
        found.add(part)
    first = start // block_bytes
    return next((first + n for n, value in enumerate(found.values()) if value != wanted[first + n]), None)
