"""A Hugging Face folder of safetensors, seen as one more checkpoint: tensors in memory made of boxes on disk.

So any rank of any layout reads exactly its own part of it, as from our own checkpoints, and the same code
does it. There are no checksums; sizes and headers are checked. Quantised weights are recognised: FP8 and int4
(:mod:`fsdmoe.checkpoint.quantised`) and the MXFP4 of gpt-oss (:mod:`fsdmoe.checkpoint.gpt_oss`) are ordinary
numbers once they are read, a matrix or an expert at a time; everything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from fsdmoe.checkpoint.blocks import FileRecord
from fsdmoe.checkpoint.disk_names import Convention, names_to_read, tied_by
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import (
    Index,
    Shape,
    StoredBox,
    StoredCodes,
    StoredTensor,
    check_tiling,
    parse_object,
)
from fsdmoe.checkpoint.gpt_oss import BLOCKS, SCALES, packed_weights
from fsdmoe.checkpoint.hf_names import Piece
from fsdmoe.checkpoint.quantised import (
    PACKED,
    PACKED_SCALE,
    PACKED_SUFFIXES,
    block_size,
    check_scales,
    group_size,
)
from fsdmoe.checkpoint.safetensors_header import MAX_HEADER, parse_header
from fsdmoe.checkpoint.storage import Storage, read_file
from fsdmoe.checkpoint.tree import Tree

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SCALE_SUFFIX = ".weight_scale_inv"
_COMPARED = 1 << 24  # bytes at a time
_FILE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")


@dataclass(frozen=True)
class HFFolder:
    config: Tree
    tensors: dict[str, StoredTensor]
    """By their names on disk, each one box of one file."""
    files: dict[str, FileRecord]
    native: bool = False
    """Pieces are those of a native decoder, which needs no transformers; its layout differs for gpt-oss."""
    is_same: Callable[[StoredTensor, StoredTensor], bool] | None = None
    """Whether two tensors of the folder hold the same values; None takes a tied pair to be one tensor."""

    @cached_property
    def names(self) -> Convention:
        return names_to_read(self.config, native=self.native)

    @property
    def tied(self) -> dict[str, str]:
        """Names under which the model may look for a tensor that is stored as another's, in a checkpoint."""
        return {f"model/{alias}": f"model/{owner}" for alias, owner in self._tied.items()}

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Without pairs of which both are here with different values: ``from_pretrained`` does not tie those,
        whatever config.json says."""
        stated = tied_by(self.config, self.names)
        if not stated or self.is_same is None:
            return stated
        found = [self.names.from_disk(name, tensor.shape) for name, tensor in self.readable.items()]
        disk = {piece.memory: self.readable[piece.disk] for piece in found if piece is not None}
        return {
            alias: owner
            for alias, owner in stated.items()
            if alias not in disk or owner not in disk or self.is_same(disk[alias], disk[owner])
        }

    def scales(self) -> dict[str, str]:
        """The names of FP8 weights, with those of their scales."""
        ending = SCALE_SUFFIX
        return {name.removesuffix(ending) + ".weight": name for name in self.tensors if name.endswith(ending)}

    @cached_property
    def packed(self) -> dict[str, Shape]:
        """The shapes of weights in MXFP4, which stand on disk as blocks and scales."""
        found = {name: self.tensors[name + BLOCKS].shape for name in packed_weights(self.tensors)}
        return {name: (experts, 32 * rows, width) for name, (experts, width, rows, _) in found.items()}

    @property
    def quantisation(self) -> str | None:
        """Of weights, in words; None where there is none."""
        if self.int4:
            return "int4"
        return "MXFP4" if self.packed else "FP8" if self.scales() else None

    @cached_property
    def int4(self) -> dict[str, str]:
        """The names of weights in int4 of compressed-tensors, with the beginnings of their tensors' names."""
        starts = [name.removesuffix(PACKED) for name in self.tensors if name.endswith(PACKED)]
        return {f"{start}.weight": start for start in starts}

    @cached_property
    def readable(self) -> dict[str, StoredTensor]:
        """Tensors as a reader gives them: quantised ones as numbers in bfloat16, without their scales."""
        endings = (SCALE_SUFFIX, *((BLOCKS, SCALES) if self.packed else ()))
        endings += PACKED_SUFFIXES if self.int4 else ()
        found = {name: tensor for name, tensor in self.tensors.items() if not name.endswith(endings)}
        block = block_size(self.config)
        for name, scale in self.scales().items():
            found[name] = _decoded(self.tensors[name].shape, self.tensors[name], self.tensors[scale], block)
        for name, shape in self.packed.items():
            found[name] = _decoded(shape, self.tensors[name + BLOCKS], self.tensors[name + SCALES], (1, 32))
        group = group_size("config.json", self.config) if self.int4 else 0
        for name, start in self.int4.items():
            codes, scales = self.tensors[start + PACKED], self.tensors[start + PACKED_SCALE]
            found[name] = _decoded((codes.shape[0], 8 * codes.shape[1]), codes, scales, (1, group))
        return found

    def pieces(self) -> list[Piece]:
        """Every tensor that is kept, as a box in memory; scales belong to their weights."""
        found = [self.names.from_disk(name, tensor.shape) for name, tensor in self.readable.items()]
        kept = [piece for piece in found if piece is not None]
        there = {piece.memory for piece in kept}
        tied = self._tied
        return [piece for piece in kept if tied.get(piece.memory) not in there]

    def memory_shapes(self) -> dict[str, Shape]:
        """The shape of every tensor in memory, from its pieces."""
        shapes: dict[str, Shape] = {}
        for piece in self.pieces():
            reach = tuple(low + size for low, size in zip(piece.low, piece.sizes, strict=True))
            shapes[piece.memory] = tuple(map(max, shapes.get(piece.memory, reach), reach))
        return shapes


def _decoded(shape: Shape, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> StoredTensor:
    stored = StoredCodes(codes, scales, block)
    box = replace(codes.boxes[0], offsets=(0,) * len(shape), sizes=shape, codes=stored)
    return StoredTensor(torch.bfloat16, shape, (box,))


def is_hf_folder(storage: Storage, name: str) -> bool:
    return storage.size(name, CONFIG) is not None and any(
        storage.size(name, f) is not None for f in (INDEX, SINGLE)
    )


def open_hf_folder(storage: Storage, name: str) -> HFFolder:
    """Read the configuration and all headers."""
    if not is_hf_folder(storage, name):
        raise CheckpointError(
            f"{storage.root}/{name}: not a Hugging Face folder: no config.json with safetensors"
        )
    config = parse_object(read_file(storage, name, CONFIG), f"{name}/{CONFIG}")
    listed = _weight_map(storage, name)
    tensors: dict[str, StoredTensor] = {}
    records = {}
    for file in [SINGLE] if listed is None else sorted(set(listed.values())):
        found, records[file] = read_header(storage, name, file)
        for key, tensor in found.items():
            if listed is not None and listed.get(key, file) != file:
                continue  # the index names another file for it
            if key in tensors:
                other = tensors[key].boxes[0].file
                raise DamagedCheckpointError(f"{name}/{file}", f"{key} is in {other} too")
            tensors[key] = tensor
    missing = [(lost, file) for lost, file in (listed or {}).items() if lost not in tensors]
    if missing:
        lost, file = missing[0]
        raise DamagedCheckpointError(
            f"{name}/{INDEX}", f"{lost} is not in {file}, which it names ({len(missing)} are missing)"
        )
    folder = HFFolder(config, tensors, records, is_same=partial(_is_same, storage, name))
    _refuse_foreign_quantisation(name, folder)
    return folder


def _is_same(storage: Storage, name: str, one: StoredTensor, other: StoredTensor) -> bool:
    """Compared byte by byte, up to the first difference."""
    (box,), (twin,) = one.boxes, other.boxes
    if (one.dtype, one.shape) != (other.dtype, other.shape) or box.codes or twin.codes:
        return False
    size = torch.Size(one.shape).numel() * one.dtype.itemsize
    mine, others = bytearray(min(size, _COMPARED)), bytearray(min(size, _COMPARED))
    for start in range(0, size, _COMPARED):
        count = min(size - start, _COMPARED)
        storage.read_into(name, box.file, box.at + start, [memoryview(mine)[:count]])
        storage.read_into(name, twin.file, twin.at + start, [memoryview(others)[:count]])
        if mine[:count] != others[:count]:
            return False
    return True


def _weight_map(storage: Storage, name: str) -> dict[str, str] | None:
    """The file of every tensor, as the index says; None where there is one file and no index."""
    if storage.size(name, INDEX) is None:
        return None
    listed = parse_object(read_file(storage, name, INDEX), f"{name}/{INDEX}").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise DamagedCheckpointError(f"{name}/{INDEX}", "has no weight_map")
    for tensor, file in listed.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise DamagedCheckpointError(
                f"{name}/{INDEX}",
                f"{tensor}: expected the name of a *.safetensors file in the same folder, got {file!r}",
            )
    return listed


def read_header(storage: Storage, name: str, file: str) -> tuple[dict[str, StoredTensor], FileRecord]:
    """The tensors of one safetensors file; the header must fit the file exactly."""
    where, size = f"{name}/{file}", storage.size(name, file)
    if size is None:
        raise DamagedCheckpointError(where, "missing")
    head = bytearray(8)
    storage.read_into(name, file, 0, [memoryview(head)])
    length = int.from_bytes(head, "little")
    if length > min(size - 8, MAX_HEADER):
        raise DamagedCheckpointError(where, "truncated, or not a safetensors file")
    text = bytearray(length)
    storage.read_into(name, file, 8, [memoryview(text)])
    try:
        found = parse_header(bytes(text), size - 8 - length, where)
    except ValueError as error:
        raise DamagedCheckpointError(where, f"not a whole safetensors file: {error}") from error
    tensors = {}
    for key, entry in found.items():
        box = StoredBox((0,) * len(entry.shape), entry.shape, file, 8 + length + entry.start)
        tensors[key] = StoredTensor(entry.dtype, entry.shape, (box,))
    return tensors, FileRecord(size, None)


def index_of(name: str, folder: HFFolder) -> Index:
    """The folder as the index of a checkpoint with one section, ``model``."""
    boxes: dict[str, list[StoredBox]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in folder.pieces():
        disk = folder.readable[piece.disk]
        box = replace(disk.boxes[0], offsets=piece.low, sizes=piece.sizes)
        boxes.setdefault(piece.memory, []).append(box)
        if dtypes.setdefault(piece.memory, disk.dtype) != disk.dtype:
            raise CheckpointError(f"{name}: the parts of {piece.memory} have different dtypes")
    tensors, shapes = {}, folder.memory_shapes()
    for memory, found in boxes.items():
        try:
            check_tiling(memory, shapes[memory], [(box.offsets, box.sizes) for box in found])
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}; are experts missing?") from error
        tensors[f"model/{memory}"] = StoredTensor(dtypes[memory], shapes[memory], tuple(found))
    return Index(tensors, {}, folder.files, {"hf_config": folder.config, "tied": folder.tied})


def refuse_transposed(name: str, folder: HFFolder) -> None:
    """Raise where weights on disk are transposed ones in memory: a rank that reads its own part of them in
    place cannot do that."""
    found = next((piece for piece in folder.pieces() if piece.form != "plain"), None)
    if found is not None:
        raise CheckpointError(
            f"{name}: {found.disk} is the transposed {found.memory}; convert the folder once with "
            "`python -m fsdmoe.checkpoint from-hf --for-transformers` and load the result"
        )


def _refuse_foreign_quantisation(name: str, folder: HFFolder) -> None:
    stated = folder.config.get("quantization_config") or {}
    method = stated.get("quant_method") if isinstance(stated, dict) else str(stated)
    packed = [n for n in folder.tensors if n.endswith((BLOCKS, SCALES, ".qweight", PACKED))]
    is_mxfp4 = method == "mxfp4" and folder.config.get("model_type") == "gpt_oss"
    if method == "compressed-tensors" and folder.int4:
        _check_int4(name, folder)
        return
    if (packed and not is_mxfp4) or (method and not is_mxfp4 and not (method == "fp8" and folder.scales())):
        raise CheckpointError(
            f"{name}: weights are quantised ({method or packed[0]}); only FP8 with block scales "
            "(DeepSeek-V3), MXFP4 of gpt-oss and int4 of compressed-tensors can be read here; dequantise it "
            "with transformers first"
        )
    if is_mxfp4 and not folder.packed:
        raise CheckpointError(
            f"{name}: config.json says that experts are MXFP4, and there are no *{BLOCKS} of them; expected "
            "both or neither: drop quantization_config from config.json if they are ordinary numbers"
        )
    check_scales(name, folder.tensors, folder.scales())


def _check_int4(name: str, folder: HFFolder) -> None:
    """Each packed weight has scales of its groups."""
    group = group_size(name, folder.config)
    for weight, start in folder.int4.items():
        rows, eighths = folder.tensors[start + PACKED].shape
        scales = folder.tensors.get(start + PACKED_SCALE)
        wanted = (rows, 8 * eighths // group)
        if scales is None or scales.shape != wanted or folder.tensors[start + PACKED].dtype != torch.int32:
            raise CheckpointError(
                f"{name}: {weight}: expected int32 codes and scales {wanted} of groups of {group}, got "
                f"{folder.tensors[start + PACKED].dtype} and {None if scales is None else scales.shape}"
            )
