"""Whether a checkpoint of adapters was trained on the weights of a Hugging Face folder.

A checkpoint keeps its base next to the adapter. The folder that a run names (``model.hf``) need not be that
base: ``checkpoint.load`` may have put other weights in its place. Both are compared by the first rows of
every tensor that is whole in the folder.
"""

from __future__ import annotations

import torch

from fsdmoe.checkpoint.hf_folder import HFFolder
from fsdmoe.checkpoint.hf_import import folder_reader
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.storage import Storage

_ROWS = 16
_MOST_APART = 0.01
"""Share of elements that may differ, in the coarser format of the two."""


def other_weight(checkpoint: RegionReader, storage: Storage, called: str, folder: HFFolder) -> str | None:
    """The name of a weight that the checkpoint has otherwise than the folder; None where all are the same."""
    reader = folder_reader(storage, called, folder)
    for piece in folder.pieces():
        name = f"model/{piece.memory}"
        stored = checkpoint.index.tensors.get(name)
        held = folder.readable[piece.disk]
        if stored is None or piece.form != "plain" or stored.shape != held.shape:
            continue
        if folder.tensors[piece.disk].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            continue  # decoded codes: the checkpoint may have rounded them
        low = (0,) * len(held.shape)
        sizes = (min(_ROWS, held.shape[0]), *held.shape[1:]) if held.shape else ()
        ours = checkpoint.read_tensor(name, low, sizes)
        theirs = reader.read_tensor(piece.disk, low, sizes)
        coarser = min((ours.dtype, theirs.dtype), key=lambda dtype: torch.finfo(dtype).bits)
        apart = ours.to(coarser) != theirs.to(coarser)
        if apart.float().mean() > _MOST_APART:
            return piece.memory
    return None
