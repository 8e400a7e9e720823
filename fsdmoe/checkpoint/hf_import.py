"""A Hugging Face folder to a checkpoint, box by box, ranks in parallel."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch

from fsdmoe.checkpoint.agree import together
from fsdmoe.checkpoint.format import Index, Shape
from fsdmoe.checkpoint.gpt_oss import in_memory, swapped_shape
from fsdmoe.checkpoint.hf_config import CLASSES, refuse_unknown
from fsdmoe.checkpoint.hf_folder import HFFolder, index_of, open_hf_folder
from fsdmoe.checkpoint.hf_names import Piece
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress
from fsdmoe.checkpoint.session import save_boxes
from fsdmoe.checkpoint.storage import Storage, StrPath, split_address


def folder_reader(storage: Storage, name: str, folder: HFFolder) -> RegionReader:
    """Reads tensors of a folder by their names on disk, quantised ones as ordinary numbers."""
    return RegionReader(storage, name, Index(folder.readable, {}, folder.files), threads=1)


def from_hf(
    source: StrPath,
    target: StrPath,
    *,
    dtype: torch.dtype | None = None,
    for_transformers: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Convert a Hugging Face folder to a checkpoint of a model (part ``model``). Collective.

    Args:
        source: A folder with ``config.json`` and safetensors.
        target: The checkpoint to write.
        dtype: Of all weights; None keeps each one's own. FP8 with block scales and MXFP4 become bf16.
        for_transformers: Take also what the native decoder does not compute, which is refused otherwise, and
            keep transformers' layout of gpt-oss: the checkpoint then loads into a wrapped model only.
        progress: Called with the number of bytes that were done since the last call.
    """
    storage, name = split_address(source)
    folder = together(lambda: _open(storage, name, for_transformers))
    reader = folder_reader(storage, name, folder)
    shapes = folder.memory_shapes()
    boxes: Boxes = {}
    for piece in folder.pieces():
        kind = dtype or folder.readable[piece.disk].dtype
        for low, sizes in _regions(piece):
            box = SavedBox(f"model/{piece.memory}", shapes[piece.memory], kind, low, sizes)
            boxes[box] = partial(_make, reader, piece, box)
    unquantised = {key: value for key, value in folder.config.items() if key != "quantization_config"}
    about = {"hf_config": unquantised, "tied": folder.tied, "from": os.fspath(source)}
    save_boxes(target, boxes, about, progress=progress)


def _open(storage: Storage, name: str, for_transformers: bool) -> HFFolder:
    folder = open_hf_folder(storage, name)
    if folder.config.get("model_type") in CLASSES and not for_transformers:
        folder = replace(folder, native=True)
        refuse_unknown(folder.config, name)
    index_of(name, folder)  # complains about missing experts before anything is written
    return folder


def _regions(piece: Piece) -> list[tuple[Shape, Shape]]:
    """The piece, or expert after expert where one tensor on disk holds them all: a layer's experts may be
    gigabytes. Each as the box of memory that it becomes."""
    if len(piece.sizes) != 3 or piece.sizes[0] == 1 or any(piece.low):
        return [(piece.low, piece.sizes)]
    return [((expert, 0, 0), (1, *piece.sizes[1:])) for expert in range(piece.sizes[0])]


def _make(reader: RegionReader, piece: Piece, box: SavedBox) -> torch.Tensor:
    if box.sizes == piece.sizes:
        values = reader.read_tensor(piece.disk)
    else:
        values = reader.read_tensor(piece.disk, box.offsets, swapped_shape(box.sizes, piece.form))
    return in_memory(values, piece.form).view(box.sizes).to(box.dtype)
