"""A stock torch.distributed.checkpoint folder: its metadata, checked, and its tensors, chunk by chunk.

::

    step-500/
        .metadata         a pickle: tensors as chunks, and the place of every chunk and object in the files
        __3_0.distcp      what rank 3 wrote: one ``torch.save`` after another

There are no checksums; that every chunk lies inside its file and that the chunks of a tensor make it up
exactly is checked when the folder is opened. Tensors and objects are read with ``weights_only=True``.
Nothing takes more memory than its bytes in the files; an object, which is a number or a list of names, no
more than ``MOST_OBJECT_BYTES``.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from fsdmoe.checkpoint.dcp_pickle import BytesEntry, Chunk, Metadata, Place, Properties, Stored, TensorEntry
from fsdmoe.checkpoint.dcp_pickle import read_metadata as read_pickle
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import Shape, check_tiling, parse_file_name, parse_shape
from fsdmoe.checkpoint.storage import Storage, read_file

DCP_METADATA = ".metadata"
MOST_OBJECT_BYTES = 64 << 20  # the names of half a million parameters
# Of a zip dozens of small places are read, each by a request of the storage: small ones are read by one.
_READ_AT_ONCE = 1 << 20
Path = tuple[str, ...]


@dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    file: str
    at: int
    length: int


@dataclass(frozen=True)
class DCPChunk:
    """A box of a tensor, saved by itself."""

    offsets: Shape
    sizes: Shape
    span: Span


@dataclass(frozen=True)
class DCPTensor:
    key: str
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[DCPChunk, ...]


@dataclass(frozen=True)
class DCPFolder:
    """What a folder holds, by the keys of its flattened state."""

    storage: Storage
    name: str
    tensors: dict[str, DCPTensor]
    objects: dict[str, Span]
    paths: dict[str, Path]
    """The keys before they were flattened: ``model.norm.weight`` may be two keys, or one with dots."""

    def read_chunk(self, tensor: DCPTensor, chunk: DCPChunk) -> torch.Tensor:
        """The values of one chunk, in host memory."""
        where = f"{self.name}/{chunk.span.file}"
        found = self._load(tensor.key, chunk.span)
        if not isinstance(found, torch.Tensor):
            raise DamagedCheckpointError(
                where, f"{tensor.key}: expected a tensor, got {type(found).__name__}"
            )
        if tuple(found.shape) != chunk.sizes or found.dtype != tensor.dtype:
            raise DamagedCheckpointError(
                where,
                f"{tensor.key}: expected {chunk.sizes} {tensor.dtype}, "
                f"got {tuple(found.shape)} {found.dtype}",
            )
        return found.detach()

    def read_number(self, key: str) -> int | float:
        """A number, whether it was saved as a tensor or as an object."""
        found = self.read_object(key)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            raise CheckpointError(f"{self.name}: {key}: expected a number, got {reprlib.repr(found)}")
        return found

    def read_object(self, key: str) -> Any:
        """An object or a scalar tensor, as a plain value."""
        if key not in self.objects:
            return self._scalar(key)
        span = self.objects[key]
        if span.length > MOST_OBJECT_BYTES:
            raise CheckpointError(
                f"{self.name}/{span.file}: {key}: expected a number or names of at most {MOST_OBJECT_BYTES} "
                f"bytes, got an object of {span.length}; leave it out (--only-model, --step)"
            )
        return self._load(key, span)

    def _scalar(self, key: str) -> Any:
        tensor = self.tensors[key]
        if math.prod(tensor.shape) != 1:
            raise CheckpointError(f"{self.name}: {key}: expected one number, got a tensor of {tensor.shape}")
        return self.read_chunk(tensor, tensor.chunks[0]).item()

    def _load(self, key: str, span: Span) -> Any:
        where = f"{self.name}/{span.file}"
        try:
            data: Any = _Slice(self.storage, self.name, span)
            if span.length <= _READ_AT_ONCE:
                data = io.BytesIO(data.read())
            if zipfile.is_zipfile(data):
                unpacked = sum(entry.file_size for entry in zipfile.ZipFile(data).infolist())
                if unpacked > span.length:  # torch packs nothing
                    raise DamagedCheckpointError(where, f"{key}: {span.length} bytes unpack to {unpacked}")
            data.seek(0)
            return torch.load(data, map_location="cpu", weights_only=True)
        except DamagedCheckpointError:
            raise
        except pickle.UnpicklingError as error:
            text = str(error).splitlines()
            asked = next(
                (line.strip() for line in text if "GLOBAL" in line or "Unsupported" in line), text[0]
            )
            raise CheckpointError(f"{where}: {key} is not plain data, and was not run: {asked}") from error
        except Exception as error:  # the zip reader's, the tensors' and the pickle's own kinds
            line = (str(error).splitlines() or [""])[0]
            raise DamagedCheckpointError(where, f"{key} at byte {span.at} cannot be read: {line}") from error


class _Slice(io.RawIOBase):
    """A span of a file as a file of its own: what is read of it is what is held in memory."""

    def __init__(self, storage: Storage, name: str, span: Span) -> None:
        self._storage, self._name, self._span, self._at = storage, name, span, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._span.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._span.length - self._at)]
        if len(view):
            self._storage.read_into(self._name, self._span.file, self._span.at + self._at, [view])
        self._at += len(view)
        return len(view)


def open_dcp_folder(storage: Storage, name: str) -> DCPFolder:
    """Read and check the metadata, and the sizes of all files."""
    where = f"{name}/{DCP_METADATA}"
    if storage.size(name, DCP_METADATA) is None:
        raise CheckpointError(
            f"{storage.root}/{name}: not a torch.distributed.checkpoint folder: no {DCP_METADATA}, which is "
            "written last; name the folder of one step"
        )
    found = read_pickle(read_file(storage, name, DCP_METADATA), where)
    try:
        spans = _spans(found, where)
        tensors, objects = _entries(found, spans)
        paths = _paths(found, [*tensors, *objects], list(tensors))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedCheckpointError(where, f"not checkpoint metadata: {error}") from error
    folder = DCPFolder(storage, name, tensors, objects, paths)
    _check_files(folder)
    return folder


def _spans(metadata: Metadata, where: str) -> dict[tuple[str, Shape | None], Span]:
    spans = {}
    for place, stored in metadata.field("storage_data").items():
        if not isinstance(place, Place) or not isinstance(stored, Stored):
            raise TypeError("the storage table holds something else than places")
        if stored.field("transform_descriptors"):
            words = ", ".join(map(str, stored.field("transform_descriptors")))
            raise CheckpointError(
                f"{where}: its files went through {words} when they were written; save it without extensions"
            )
        offset = place.field("offset")
        key = (_text(place.field("fqn")), None if offset is None else parse_shape(offset))
        file = parse_file_name(stored.field("relative_path"), where)
        at, length = parse_shape((stored.field("offset"), stored.field("length")))
        spans[key] = Span(file, at, length)
    return spans


def _entries(
    metadata: Metadata, spans: dict[tuple[str, Shape | None], Span]
) -> tuple[dict[str, DCPTensor], dict[str, Span]]:
    tensors, objects = {}, {}
    for key, entry in metadata.field("state_dict_metadata").items():
        if isinstance(entry, BytesEntry):
            if (key, None) not in spans:
                raise ValueError(f"{key}: it has no place in the files")
            objects[_text(key)] = spans[key, None]
        elif isinstance(entry, TensorEntry):
            tensors[_text(key)] = _tensor(key, entry, spans)
        else:
            raise TypeError(f"{key}: neither a tensor nor an object")
    return tensors, objects


def _tensor(key: str, entry: TensorEntry, spans: dict[tuple[str, Shape | None], Span]) -> DCPTensor:
    properties = entry.field("properties")
    if not isinstance(properties, Properties) or not isinstance(properties.state[0], torch.dtype):
        raise TypeError(f"{key}: no dtype")
    dtype, shape, chunks = properties.state[0], parse_shape(entry.field("size")), []
    for chunk in entry.field("chunks"):
        if not isinstance(chunk, Chunk):
            raise TypeError(f"{key}: a chunk is a {type(chunk).__name__}")
        offsets, sizes = parse_shape(chunk.field("offsets")), parse_shape(chunk.field("sizes"))
        if not math.prod(sizes):
            continue  # of a rank that holds nothing
        span = spans.get((key, offsets))
        if span is None:
            raise ValueError(f"{key}: the chunk at {offsets} has no place in the files")
        if span.length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{key}: {span.length} bytes for a chunk of {sizes} {dtype}")
        chunks.append(DCPChunk(offsets, sizes, span))
    try:
        check_tiling(key, shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    except ValueError as error:
        raise ValueError(
            f"{error}; a save of DTensors with _StridedShard writes such chunks: pass the state through "
            "fsdmoe.checkpoint.plain_placements before dcp.save"
        ) from error
    return DCPTensor(key, dtype, shape, tuple(chunks))


def _paths(metadata: Metadata, keys: list[str], tensors: list[str]) -> dict[str, Path]:
    """As the saver's planner recorded them; where it did not, told from the keys."""
    recorded = metadata.field("planner_data")
    if isinstance(recorded, dict) and recorded:
        return {key: tuple(map(str, recorded[key])) if key in recorded else (key,) for key in keys}
    weights = [key for key in tensors if not key.startswith(("optim.", "optimizer."))]
    is_nested = all(key.startswith("model.") for key in weights)  # a bare state has its lm_head next to it
    return {
        key: tuple(key.split(".", 1)) if is_nested or key.startswith(("optim.", "optimizer.")) else (key,)
        for key in keys
    }


def _check_files(folder: DCPFolder) -> None:
    ends: dict[str, int] = {}
    spans = [chunk.span for tensor in folder.tensors.values() for chunk in tensor.chunks]
    for span in (*spans, *folder.objects.values()):
        ends[span.file] = max(ends.get(span.file, 0), span.at + span.length)
    for file, end in sorted(ends.items()):
        size = folder.storage.size(folder.name, file)
        if size is None:
            raise DamagedCheckpointError(f"{folder.name}/{file}", "missing")
        if size < end:
            raise DamagedCheckpointError(f"{folder.name}/{file}", f"truncated: {size} bytes of {end}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected the name of a tensor, got {value!r}")
    return value
