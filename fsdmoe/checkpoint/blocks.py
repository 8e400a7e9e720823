"""Checksums by block: a file is a sequence of blocks of equal size, each with its CRC-32.

A reader that needs part of a file verifies exactly the blocks it touches, so loading checks every byte it
uses without reading the rest, and a damaged place is known to the block. ``zlib.crc32`` releases the
interpreter lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

BLOCK_BYTES = 1 << 20


class Sink(Protocol):
    """Where bytes go: an open file."""

    def write(self, data: memoryview | bytes, /) -> object: ...


class BlockWriter:
    """Writes to a file and keeps the checksum of every block."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._running = 0
        self._done: list[int] = []
        self.num_bytes = 0

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        at = 0
        while at < len(view):
            left = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            part = view[at : at + left]
            self._running = zlib.crc32(part, self._running)
            self._sink.write(part)
            at += len(part)
            self.num_bytes += len(part)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._done.append(self._running)
                self._running = 0

    def checksums(self) -> list[int]:
        """One a block; the last block may be short."""
        return [*self._done, self._running] if self.num_bytes % BLOCK_BYTES else list(self._done)


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
    block, running, filled = start // block_bytes, 0, 0
    for part in parts:
        at = 0
        while at < len(part):
            piece = part[at : at + block_bytes - filled]
            running = zlib.crc32(piece, running)
            at += len(piece)
            filled += len(piece)
            if filled == block_bytes:
                if running != wanted[block]:
                    return block
                block, running, filled = block + 1, 0, 0
    return block if filled and running != wanted[block] else None
