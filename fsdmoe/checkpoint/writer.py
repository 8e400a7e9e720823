"""Writes a checkpoint: each rank its boxes in a few safetensors files, the coordinator the two JSON files.

The order is what makes it safe: data files (durable one by one), metadata, manifest, then the folder
becomes visible at once and ``latest`` names it. A crash before that moment leaves the previous checkpoint
as it was.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdmoe.checkpoint.blocks import BlockWriter, FileRecord
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import (
    MANIFEST,
    METADATA,
    StoredBox,
    StoredTensor,
    manifest_bytes,
    metadata_bytes,
    parse_manifest,
)
from fsdmoe.checkpoint.reader import peek_serial
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress, write_safetensors
from fsdmoe.checkpoint.storage import Storage
from fsdmoe.checkpoint.tree import Tree

_BYTES_WORTH_A_FILE = 32 << 20
NOT_ENOUGH = "not enough space"
"""In the error of a save that was not begun."""
_CONTENT = "boxes of fsdmoe tensors: name@offsets"


@dataclass(frozen=True)
class SaveOrder:
    """One checkpoint to be written."""

    storage: Storage
    name: str
    values: Tree
    about: Tree
    threads: int = 4
    point: bool = False
    """Let ``latest`` name it."""


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint, and at which byte each of its boxes begins."""

    name: str
    record: FileRecord
    starts: dict[SavedBox, int]


def begin(order: SaveOrder) -> None:
    """On the coordinator, before any rank writes."""
    with travelling_errors():
        order.storage.begin(order.name)


def write_share(
    order: SaveOrder, rank: int, boxes: Boxes, progress: Progress = no_progress
) -> list[WrittenFile]:
    """Write the boxes of this rank, durably."""
    bins = _fill_bins(boxes, order.threads)

    def write(number: int) -> WrittenFile:
        file = f"data-{rank:05d}-{number}.safetensors"
        chosen = {box: boxes[box] for box in bins[number]}

        def fill(handle: Any) -> WrittenFile:
            writer = BlockWriter(handle)
            starts = write_safetensors(writer, chosen, _name_in_file, _CONTENT, progress)
            return WrittenFile(file, writer.record(), starts)

        return order.storage.write(order.name, file, fill)

    with travelling_errors():
        _check_space(order, rank, boxes)
        with ThreadPoolExecutor(max(1, len(bins)), "checkpoint-write") as pool:
            return [done.result() for done in [pool.submit(write, number) for number in range(len(bins))]]


def documents(order: SaveOrder, written: Iterable[WrittenFile], serial: int) -> dict[str, bytes]:
    """The two JSON files of a checkpoint, in the order in which they are written."""
    files: dict[str, FileRecord] = {}
    kinds: dict[str, SavedBox] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for file in written:
        files[file.name] = file.record
        for box, start in file.starts.items():
            kinds[box.name] = box
            boxes.setdefault(box.name, []).append(StoredBox(box.offsets, box.sizes, file.name, start))
    tensors = {
        name: StoredTensor(kinds[name].dtype, kinds[name].shape, tuple(found))
        for name, found in boxes.items()
    }
    metadata = metadata_bytes(tensors, order.values, order.about)
    writer = BlockWriter(io.BytesIO())
    writer.write(metadata)
    files[METADATA] = writer.record()
    return {METADATA: metadata, MANIFEST: manifest_bytes(files, serial)}


def write_documents(order: SaveOrder, made: dict[str, bytes]) -> None:
    """Write both, and make the checkpoint visible."""
    for file, data in made.items():
        order.storage.write(order.name, file, partial(_put, data))
    order.storage.commit(order.name)


def _put(data: bytes, handle: Any) -> None:
    handle.write(data)


def finish(order: SaveOrder, written: Iterable[WrittenFile]) -> None:
    """On the coordinator, when all ranks have written: make the checkpoint visible."""
    with travelling_errors():
        serials = [peek_serial(order.storage, name) for name in order.storage.names()]
        serial = 1 + max(serials, default=0) + serials.count(0)  # and those that cannot be read, most likely
        made = documents(order, written, serial)
        _check_there(order, parse_manifest(made[MANIFEST], order.name)[0])
        write_documents(order, made)
        if order.point:
            order.storage.point_at(order.name)


def _name_in_file(box: SavedBox) -> str:
    return f"{box.name}@{','.join(map(str, box.offsets))}"


def _check_space(order: SaveOrder, rank: int, boxes: Iterable[SavedBox]) -> None:
    """Say so before writing half of it; the disk may still fill up while writing, which is handled too."""
    need, free = sum(box.num_bytes for box in boxes), order.storage.free_bytes()
    if free is not None and need > free:
        raise CheckpointError(
            f"{order.storage.root}: {NOT_ENOUGH}: rank {rank} needs {need / 1e9:.2f} GB "
            f"and {free / 1e9:.2f} GB are free; free some, or name another checkpoint.folder"
        )


def _check_there(order: SaveOrder, files: dict[str, FileRecord]) -> None:
    """Before anything becomes visible: the files of all ranks."""
    for file, record in files.items():
        if file != METADATA and order.storage.written_size(order.name, file) != record.num_bytes:
            raise CheckpointError(
                f"{order.storage.root}/{order.name}/{file}: written by its rank but not seen "
                "by the coordinator; checkpoint.folder must be on storage that all ranks share"
            )


@contextlib.contextmanager
def travelling_errors() -> Iterator[None]:
    """Errors as text: torch pickles what one rank raises, and a kind that cannot be made again from its
    pickle (many drivers have such) would leave the other ranks waiting."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _fill_bins(boxes: Iterable[SavedBox], threads: int) -> list[list[SavedBox]]:
    """Boxes over files of about equal size; a small rank writes one file."""
    largest_first = sorted(boxes, key=lambda box: box.num_bytes, reverse=True)
    total = sum(box.num_bytes for box in largest_first)
    bins: list[list[SavedBox]] = [[] for _ in range(max(1, min(threads, total // _BYTES_WORTH_A_FILE)))]
    sizes = [0] * len(bins)
    for box in largest_first:
        smallest = sizes.index(min(sizes))
        bins[smallest].append(box)
        sizes[smallest] += box.num_bytes
    return [found for found in bins if found]
