"""Reads a checkpoint: regions of stored boxes straight into tensors, every block verified on the way.

Reads of one file are sorted, joined where they are near each other, and done by a few threads; host memory
in use is a window per thread, whatever the size of the tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fsdmoe.checkpoint.blocks import first_bad_block
from fsdmoe.checkpoint.errors import DamagedCheckpointError
from fsdmoe.checkpoint.format import (
    MANIFEST,
    METADATA,
    Index,
    StoredBox,
    StoredCodes,
    StoredTensor,
    parse_manifest,
    parse_metadata,
)
from fsdmoe.checkpoint.gpt_oss import dequantise_mxfp4
from fsdmoe.checkpoint.quantised import dequantise, dequantise_int4
from fsdmoe.checkpoint.storage import Storage, read_file
from fsdmoe.core.boxes import contiguous_strides, overlap

_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True)
class Read:
    """A region of a stored box and the tensor (of the region's shape, any strides, device and dtype) it goes
    to.
    """

    box: StoredBox
    dtype: torch.dtype
    low: tuple[int, ...]
    """Where the region begins inside the box."""
    target: torch.Tensor

    def span(self) -> tuple[int, int]:
        """First byte and end of the region in the file."""
        strides = contiguous_strides(self.box.sizes)
        first = sum(o * s for o, s in zip(self.low, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(self.target.shape, strides, strict=True))
        size = self.dtype.itemsize
        return self.box.at + first * size, self.box.at + (last + 1) * size

    def in_windows(self) -> list[Read]:
        """The same read as several that span a window each, cut along the outermost dim that is longer than
        1.
        """
        start, end = self.span()
        dim = next((d for d, n in enumerate(self.target.shape) if n > 1), None)
        if end - start <= _WINDOW_BYTES or dim is None:
            return [self]
        stride = contiguous_strides(self.box.sizes)[dim] * self.dtype.itemsize
        rows = max(1, _WINDOW_BYTES // stride)
        parts = []
        for row in range(0, self.target.shape[dim], rows):
            low = (*self.low[:dim], self.low[dim] + row, *self.low[dim + 1 :])
            target = self.target.narrow(dim, row, min(rows, self.target.shape[dim] - row))
            parts.extend(Read(self.box, self.dtype, low, target).in_windows())
        return parts

    def bytes_of_target(self) -> memoryview | None:
        """The target's own memory, where the region's bytes can be read straight into it."""
        target, (start, end) = self.target, self.span()
        if target.device.type != "cpu" or target.dtype != self.dtype or not target.is_contiguous():
            return None
        if end - start != target.numel() * self.dtype.itemsize:
            return None
        return target.view(-1).view(torch.uint8).numpy().data

    def take(self, window: torch.Tensor, window_start: int) -> None:
        """Copy the region out of the bytes that begin at ``window_start`` of the file."""
        start, end = self.span()
        part = window[start - window_start : end - window_start]
        if part.storage_offset() % self.dtype.itemsize:  # foreign safetensors need not align their tensors
            part = part.clone()
        values = part.view(self.dtype)
        region = values.as_strided(
            self.target.shape, contiguous_strides(self.box.sizes), values.storage_offset()
        )
        self.target.copy_(region)


def open_checkpoint(storage: Storage, name: str) -> Index:
    """Read and check the two JSON files. :class:`DamagedCheckpointError` names what is wrong."""
    files, serial, block = parse_manifest(read_file(storage, name, MANIFEST), f"{name}/{MANIFEST}")
    data, record = read_file(storage, name, METADATA), files.get(METADATA)
    if record is None or record.num_bytes != len(data):
        raise DamagedCheckpointError(f"{name}/{METADATA}", f"{len(data)} bytes, not what the manifest says")
    if first_bad_block([memoryview(data)], 0, record.checksums or (), block) is not None:
        raise DamagedCheckpointError(f"{name}/{METADATA}", "its checksum does not match")
    tensors, values, about = parse_metadata(data, f"{name}/{METADATA}", files)
    return Index(tensors, values, files, about, serial, block)


def peek_serial(storage: Storage, name: str) -> int:
    """The serial that a manifest states; 0 when it cannot be read."""
    try:
        return parse_manifest(read_file(storage, name, MANIFEST), name)[1]
    except (DamagedCheckpointError, OSError):
        return 0


def check_sizes(storage: Storage, name: str, index: Index, part: int = 0, num_parts: int = 1) -> None:
    """Every file there and of its size; ranks share the work."""
    for file in sorted(index.files)[part::num_parts]:
        size = storage.size(name, file)
        if size is None:
            raise DamagedCheckpointError(f"{name}/{file}", "missing")
        if size != index.files[file].num_bytes:
            raise DamagedCheckpointError(
                f"{name}/{file}", f"{size} bytes instead of {index.files[file].num_bytes}"
            )


def check_blocks(
    storage: Storage, name: str, index: Index, part: int = 0, num_parts: int = 1, threads: int = 4
) -> None:
    """Every block of every file; ranks share the work."""
    steps = max(1, _WINDOW_BYTES // index.block_bytes) * index.block_bytes
    windows = [
        (file, at, min(at + steps, record.num_bytes))
        for file, record in sorted(index.files.items())
        for at in range(0, record.num_bytes, steps)
    ]
    reader = RegionReader(storage, name, index, threads)
    reader.run([(file, start, end, []) for file, start, end in windows[part::num_parts]])


class RegionReader:
    """Carries out reads against one checkpoint."""

    def __init__(self, storage: Storage, name: str, index: Index, threads: int = 4) -> None:
        self._storage = storage
        self._threads = threads
        self.name = name
        self.index = index
        self._local = threading.local()

    def read(self, reads: Sequence[Read]) -> None:
        """Do all reads; their targets hold the values afterwards."""
        by_file: dict[str, list[Read]] = {}
        for read in reads:
            if not read.target.numel():
                continue
            if read.box.codes is not None:
                self._decode(read, read.box.codes)
            else:
                by_file.setdefault(read.box.file, []).extend(read.in_windows())
        self.run([job for file, parts in sorted(by_file.items()) for job in self._join(file, parts)])

    def _decode(self, read: Read, stored: StoredCodes) -> None:
        """A region of a quantised box: one expert, or whole blocks of rows of a matrix at a time."""
        if len(stored.codes.shape) == 4:
            for index, into in enumerate(read.target):
                parts = [self._rows(each, read.low[0] + index, 1) for each in (stored.codes, stored.scales)]
                into.copy_(dequantise_mxfp4(*parts)[0][_window(read.low[1:], into)])
            return
        *_, row, column = read.low
        into = read.target[(0,) * (read.target.dim() - 2)]  # an expert's matrix is a box of three dims
        height = stored.block[0]
        first = row // height
        last = -(-(row + len(into)) // height)
        start = first * height
        end = min(stored.codes.shape[0], last * height)
        codes = self._rows(stored.codes, start, end - start)
        scales = self._rows(stored.scales, first, last - first)
        if codes.dtype == torch.int32:
            values = dequantise_int4(codes, scales)
        else:
            values = dequantise(codes, scales, stored.block, torch.float32)
        into.copy_(values[_window((row - start, column), into)])

    def _rows(self, stored: StoredTensor, first: int, number: int) -> torch.Tensor:
        out = torch.empty((number, *stored.shape[1:]), dtype=stored.dtype)
        self.read(region_reads(stored, out, (first, *[0] * (len(stored.shape) - 1))))
        return out

    def read_tensor(
        self, name: str, low: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A region of a stored tensor (all of it by default) as a new host tensor."""
        stored = self.index.tensors[name]
        low = tuple(low) if low is not None else (0,) * len(stored.shape)
        sizes = tuple(sizes) if sizes is not None else stored.shape
        out = torch.empty(sizes, dtype=stored.dtype)
        self.read(region_reads(stored, out, low))
        return out

    def run(self, jobs: list[tuple[str, int, int, list[Read]]]) -> None:
        """Jobs (file, first byte, end, reads inside): read, verify, hand out."""
        if len(jobs) < 2 or self._threads < 2:
            for job in jobs:
                self._run(*job)
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="checkpoint-read") as pool:
            for done in [pool.submit(self._run, *job) for job in jobs]:
                done.result()

    def _join(self, file: str, reads: list[Read]) -> list[tuple[str, int, int, list[Read]]]:
        """Neighbouring reads together, as long as they fit a window."""
        jobs: list[tuple[str, int, int, list[Read]]] = []
        block = self.index.block_bytes
        for (start, end), read in sorted(((read.span(), read) for read in reads), key=lambda pair: pair[0]):
            if jobs:
                _, first, last, members = jobs[-1]
                if start <= last + block and max(last, end) - first <= _WINDOW_BYTES:
                    members.append(read)
                    jobs[-1] = (file, first, max(last, end), members)
                    continue
            jobs.append((file, start, end, [read]))
        return jobs

    def _run(self, file: str, start: int, end: int, reads: list[Read]) -> None:
        record, block = self.index.files[file], self.index.block_bytes
        if record.checksums is not None:  # whole blocks, so that they can be checked
            start = start // block * block
            end = min(-(-end // block) * block, record.num_bytes)
        parts, window = self._direct(start, end, reads), None
        if parts is None:
            devices = [read.target.device for read in reads if read.target.device.type == "cuda"]
            window = self._buffer(end - start, devices[0] if devices else None)
            parts = [window.numpy().data]
        self._storage.read_into(self.name, file, start, parts)
        if record.checksums is not None:
            bad = first_bad_block(parts, start, record.checksums, block)
            if bad is not None:
                raise DamagedCheckpointError(
                    f"{self.name}/{file}", f"the checksum of block {bad} does not match"
                )
        if window is not None:
            for read in reads:
                read.take(window, start)

    def _direct(self, start: int, end: int, reads: list[Read]) -> list[memoryview] | None:
        """Buffers for ``[start, end)`` that are the targets' own memory, with scratch for what lies between;
        None when a target needs a copy anyway (another dtype or device, strides, or the same bytes as
        another's)."""
        parts: list[memoryview] = []
        scratch = self._buffer(end - start).numpy().data
        at = start
        for read in reads:
            own, (first, last) = read.bytes_of_target(), read.span()
            if own is None or first < at:
                return None
            parts += [scratch[at - start : first - start], own]
            at = last
        return [*parts, scratch[at - start : end - start]]

    def _buffer(self, num_bytes: int, device: torch.device | None = None) -> torch.Tensor:
        """This thread's window, reused from read to read; pinned where it goes to a GPU."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes or (device is not None and not buffer.is_pinned()):
            with torch.cuda.device(device) if device is not None else contextlib.nullcontext():
                size = max(num_bytes, 1 << 20)
                pinned = device is not None
                buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._local.buffer = buffer
        return buffer[:num_bytes]


def _window(low: Sequence[int], like: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(low, like.shape, strict=True))


def region_reads(stored: StoredTensor, target: torch.Tensor, low: Sequence[int]) -> list[Read]:
    """Reads that fill ``target``, which is the region of the stored tensor that begins at ``low``."""
    reads = []
    for box in stored.boxes:
        common = overlap(box.offsets, box.sizes, low, target.shape)
        if common is None:
            continue
        inside = target
        for dim, (first, size) in enumerate(zip(*common, strict=True)):
            inside = inside.narrow(dim, first - low[dim], size)
        begin = tuple(first - o for first, o in zip(common[0], box.offsets, strict=True))
        reads.append(Read(box, stored.dtype, begin, inside))
    return reads
