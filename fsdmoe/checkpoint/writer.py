"""Writes a checkpoint: each rank its boxes in a few safetensors files, the coordinator the two JSON files.

The order is what makes it safe: data files (durable one by one), metadata, manifest, then the folder
becomes visible at once and ``latest`` names it. A crash before that moment leaves the previous checkpoint
as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdmoe.checkpoint.blocks import BlockWriter
from fsdmoe.checkpoint.dtypes import dtype_name
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import (
    MANIFEST,
    METADATA,
    FileRecord,
    StoredBox,
    StoredTensor,
    manifest_bytes,
    metadata_bytes,
)
from fsdmoe.checkpoint.planner import item_bytes
from fsdmoe.checkpoint.reader import peek_serial
from fsdmoe.checkpoint.storage import Storage
from fsdmoe.checkpoint.tree import Tree

_BYTES_WORTH_A_FILE = 32 << 20
_BOUNCE_BYTES = 32 << 20
_HEADER_ALIGNMENT = 64


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


class BoxWriter(StorageWriter):
    """torch.distributed.checkpoint's storage side of one save."""

    def __init__(self, order: SaveOrder, rank: int) -> None:
        self._order, self._rank = order, rank

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on the coordinator, after planning and before any rank writes."""
        with travelling_errors():
            self._order.storage.begin(self._order.name)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._check_space(plan)
        bins = _fill_bins(plan.items, self._order.threads)
        pool = ThreadPoolExecutor(max(1, len(bins)), thread_name_prefix="checkpoint-write")
        with travelling_errors(), pool:
            jobs = [
                pool.submit(self._write_file, number, items, planner) for number, items in enumerate(bins)
            ]
            results = [result for job in jobs for result in job.result()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with travelling_errors():
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        order, flat = self._order, [result for part in results for result in part]
        files = {r.index.fqn: r.storage_data for r in flat if isinstance(r.storage_data, FileRecord)}
        places = {r.index: r.storage_data for r in flat if not isinstance(r.storage_data, FileRecord)}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            boxes = [
                StoredBox(tuple(c.offsets), tuple(c.sizes), *places[MetadataIndex(name, c.offsets)])
                for c in entry.chunks
            ]
            tensors[name] = StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(boxes))
        files[METADATA] = self._write_small(METADATA, metadata_bytes(tensors, order.values, order.about))
        serial = 1 + max((peek_serial(order.storage, name) for name in order.storage.names()), default=0)
        self._write_small(MANIFEST, manifest_bytes(files, serial))
        order.storage.commit(order.name)
        self._check_visible(files)
        if order.point:
            order.storage.point_at(order.name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def _write_file(self, number: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        file = f"data-{self._rank:05d}-{number}.safetensors"
        items = sorted(items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)  # type: ignore[union-attr]
        header, starts = _safetensors_header(items)
        results = []
        with self._order.storage.create(self._order.name, file) as handle:
            writer = BlockWriter(handle)
            writer.write(header)
            for item, start in zip(items, starts, strict=True):
                assert writer.num_bytes == start
                for part in _as_bytes(planner.resolve_data(item)):  # type: ignore[arg-type]
                    writer.write(part)
                results.append(WriteResult(item.index, writer.num_bytes - start, (file, start)))
        record = FileRecord(writer.num_bytes, writer.checksums())
        return [*results, WriteResult(MetadataIndex(file), writer.num_bytes, record)]

    def _write_small(self, file: str, data: bytes) -> FileRecord:
        with self._order.storage.create(self._order.name, file) as handle:
            writer = BlockWriter(handle)
            writer.write(data)
        return FileRecord(writer.num_bytes, writer.checksums())

    def _check_space(self, plan: SavePlan) -> None:
        """Say so before writing half of it; the disk may still fill up while writing, which is handled
        too."""
        need, free = sum(item_bytes(item) for item in plan.items), self._order.storage.free_bytes()
        if free is not None and need > free:
            raise CheckpointError(
                f"{self._order.storage.root}: not enough space: rank {self._rank} needs {need / 1e9:.2f} GB "
                f"and {free / 1e9:.2f} GB are free; free some, or lower checkpoint.keep_last"
            )

    def _check_visible(self, files: dict[str, FileRecord]) -> None:
        for file, record in files.items():
            if self._order.storage.size(self._order.name, file) != record.num_bytes:
                raise CheckpointError(
                    f"{self._order.storage.root}/{self._order.name}/{file}: written by its rank but not seen "
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


def _fill_bins(items: list[WriteItem], threads: int) -> list[list[WriteItem]]:
    """Items over files of about equal size; a small rank writes one file."""
    total = sum(map(item_bytes, items))
    bins: list[list[WriteItem]] = [[] for _ in range(max(1, min(threads, total // _BYTES_WORTH_A_FILE)))]
    sizes = [0] * len(bins)
    for item in sorted(items, key=item_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        bins[smallest].append(item)
        sizes[smallest] += item_bytes(item)
    return [items for items in bins if items]


def _safetensors_header(items: list[WriteItem]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file of these boxes in this order, and where each box begins in the file.

    Wider dtypes come first, so that every box is aligned to its own element size.
    """
    document: dict[str, Any] = {
        "__metadata__": {"format": "pt", "content": "boxes of fsdmoe tensors: name@offsets"}
    }
    at, starts = 0, []
    for item in items:
        data, end = item.tensor_data, at + item_bytes(item)
        assert data is not None
        key = f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
        document[key] = {
            "dtype": dtype_name(data.properties.dtype, item.index.fqn),
            "shape": list(data.chunk.sizes),
            "data_offsets": [at, end],
        }
        starts.append(at)
        at = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _as_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's elements in row-major order, without a copy where it lies so in host memory."""
    if not tensor.numel():
        return
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    with torch.cuda.device(flat.device):  # this thread's own default would be the first GPU
        size = min(_BOUNCE_BYTES, flat.numel())
        bounce = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        for start in range(0, flat.numel(), _BOUNCE_BYTES):
            part = flat[start : start + _BOUNCE_BYTES]
            bounce[: part.numel()].copy_(part)
            yield bounce.numpy().data[: part.numel()]
