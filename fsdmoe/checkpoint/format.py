"""What a checkpoint folder holds, and how its two JSON files are written, read back and validated.

::

    step_00000500/
        manifest.json               every other file with its size and the checksums of its blocks
        metadata.json               tensors as boxes with their places in the files; the plain values
        data-00003-0.safetensors    boxes that rank 3 wrote, thread 0; readable by any safetensors tool

The manifest carries a checksum of itself. Nothing is unpickled or looked up by a name from a file, and file
names that would lead out of the folder are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdmoe.checkpoint.blocks import BLOCK_BYTES, FileRecord, num_blocks, pack, unpack
from fsdmoe.checkpoint.dtypes import dtype_name, dtype_named
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core.boxes import Shape, overlap

MANIFEST, METADATA = "manifest.json", "metadata.json"
LATEST, MARKER, BEGUN = "latest", "COMMITTED", "BEGUN"
FORMAT, VERSION = "fsdmoe-checkpoint", 1


def is_scale_history(name: str) -> bool:
    """Whether a tensor is a buffer of delayed scales, which earlier versions had; nothing reads it."""
    return name.rpartition(".")[2] == "amax_history"


@dataclass(frozen=True)
class StoredBox:
    """A box of a global tensor, contiguous in a file."""

    offsets: Shape
    sizes: Shape
    file: str
    at: int
    """Byte at which it begins."""
    codes: StoredCodes | None = None
    """What it is decoded from, where it is not there as numbers (``file`` and ``at`` then say nothing)."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class StoredCodes:
    """A quantised matrix, or all experts in MXFP4, on disk: codes, and the scales of their blocks."""

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    """Rows and columns that share a scale."""


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: Shape
    boxes: tuple[StoredBox, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """Everything known of a checkpoint without reading a tensor."""

    tensors: dict[str, StoredTensor]
    values: Tree
    files: dict[str, FileRecord]
    about: Tree = field(default_factory=dict)
    """Who wrote it: layout, versions, time, step."""
    serial: int = 0
    """Counts the checkpoints of one folder in the order they were finished."""
    block_bytes: int = BLOCK_BYTES

    @property
    def is_foreign(self) -> bool:
        """Not written by us: a Hugging Face folder, without checksums."""
        return any(record.checksums is None for record in self.files.values())

    def digest(self) -> str:
        """Of all that it holds, by checksums; of sizes and names where there are none."""
        digest = hashlib.blake2b(
            json.dumps(self.about.get("hf_config"), sort_keys=True).encode(), digest_size=8
        )
        for name, record in sorted(self.files.items()):
            digest.update(f"{name} {record.num_bytes} {list(record.checksums or ())}".encode())
        return digest.hexdigest()


def metadata_bytes(tensors: dict[str, StoredTensor], values: Tree, about: Tree) -> bytes:
    files = sorted({box.file for tensor in tensors.values() for box in tensor.boxes})
    numbers = {file: number for number, file in enumerate(files)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "about": about,
        "values": values,
        "files": files,
        "tensors": {
            name: {
                "dtype": dtype_name(tensor.dtype, name),
                "shape": list(tensor.shape),
                "boxes": [[list(b.offsets), list(b.sizes), numbers[b.file], b.at] for b in tensor.boxes],
            }
            for name, tensor in sorted(tensors.items())
        },
    }
    return json.dumps(document, separators=(",", ":")).encode()


def manifest_bytes(files: dict[str, FileRecord], serial: int) -> bytes:
    document: Tree = {
        "format": FORMAT,
        "version": VERSION,
        "serial": serial,
        "block_bytes": BLOCK_BYTES,
        "files": {
            name: {"bytes": record.num_bytes, "crc32": pack(record.checksums or ())}
            for name, record in sorted(files.items())
        },
    }
    document["self"] = _self_checksum(document)
    return json.dumps(document, indent=1).encode()


def parse_manifest(data: bytes, where: str) -> tuple[dict[str, FileRecord], int, int]:
    """Files, serial and block size, or :class:`DamagedCheckpointError` naming ``where``."""
    document = _document(data, where)
    stated = document.pop("self", None)
    if stated != _self_checksum(document):
        raise DamagedCheckpointError(where, "its own checksum does not match")
    try:
        block = _natural(document["block_bytes"])
        files = {}
        for name, record in document["files"].items():
            checksums = unpack(record["crc32"])
            files[parse_file_name(name, where)] = FileRecord(_natural(record["bytes"]), checksums)
            if block < 1 or len(checksums) != num_blocks(record["bytes"], block):
                raise ValueError(f"checksums of {name} do not cover it")
        return files, _natural(document["serial"]), block
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(where, f"not a manifest: {error}") from error


def parse_metadata(
    data: bytes, where: str, files: dict[str, FileRecord]
) -> tuple[dict[str, StoredTensor], Tree, Tree]:
    """Tensors, values and the about section; every box inside its file, every tensor covered exactly once."""
    document = _document(data, where)
    try:
        names = [parse_file_name(name, where) for name in document["files"]]
        tensors = {
            name: _parse_tensor(name, entry, names, files, where)
            for name, entry in document["tensors"].items()
        }
        values, about = document["values"], document["about"]
        if not isinstance(values, dict) or not isinstance(about, dict):
            raise TypeError("values and about must be objects")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DamagedCheckpointError(where, f"not checkpoint metadata: {error!r}") from error
    return tensors, values, about


def _parse_tensor(
    name: str, entry: Any, names: list[str], files: dict[str, FileRecord], where: str
) -> StoredTensor:
    dtype, shape = dtype_named(entry["dtype"], f"{where}: {name}"), parse_shape(entry["shape"])
    boxes = []
    for offsets, sizes, number, at in entry["boxes"]:
        box = StoredBox(parse_shape(offsets), parse_shape(sizes), names[_natural(number)], _natural(at))
        if box.file not in files or box.at + box.numel * dtype.itemsize > files[box.file].num_bytes:
            raise ValueError(f"a box of {name} lies outside {box.file}")
        if box.at % dtype.itemsize:
            raise ValueError(f"a box of {name} is not aligned in {box.file}")
        boxes.append(box)
    check_tiling(name, shape, [(box.offsets, box.sizes) for box in boxes])
    return StoredTensor(dtype, shape, tuple(boxes))


def check_tiling(name: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise ``ValueError`` unless the boxes (offsets, sizes) cover the tensor exactly once."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a box of {name} has another number of dims than {shape}")
        if any(o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a box of {name} leaves {shape}")
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise ValueError(f"the boxes of {name} do not make up {shape}")
    if not shape or len(boxes) < 2:
        return
    sweep = max(range(len(shape)), key=lambda dim: shape[dim])
    active: list[tuple[Shape, Shape]] = []
    for box in sorted((box for box in boxes if math.prod(box[1])), key=lambda box: box[0][sweep]):
        active = [(o, n) for o, n in active if o[sweep] + n[sweep] > box[0][sweep]]
        if any(overlap(*other, *box) for other in active):
            raise ValueError(f"boxes of {name} overlap")
        active.append(box)


def parse_object(data: bytes, where: str) -> Tree:
    """A JSON object, or :class:`DamagedCheckpointError` naming ``where``."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(where, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError(where, "not a JSON object")
    return document


def _document(data: bytes, where: str) -> Tree:
    document = parse_object(data, where)
    if document.get("format") != FORMAT:
        raise DamagedCheckpointError(where, "not written by fsdmoe")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: format version {document.get('version')}, this release reads {VERSION}"
        )
    return document


def _self_checksum(document: Tree) -> str:
    return pack([zlib.crc32(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())])


def parse_file_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & set("/\\\0"):
        raise DamagedCheckpointError(where, f"names a file outside its folder: {name!r}")
    return name


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, got {value!r}")
    return value


def parse_shape(values: Iterable[Any]) -> Shape:
    return tuple(_natural(value) for value in values)
