"""Reads the pickle ``.metadata`` of a torch.distributed.checkpoint folder without running anything in it.

Unpickling looks classes up by the names that the file gives and calls them. Here the names are a closed
table, and what is looked up is not even torch's class but a record that keeps what it is given. Every other
name is refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from fsdmoe.checkpoint.dtypes import KNOWN_DTYPES
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError


class PickledRecord:
    """What stands for an object of a pickle: its arguments and its state, and no behaviour."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, default: Any = None) -> Any:
        state = getattr(self, "state", None)
        return state.get(name, default) if isinstance(state, dict) else default


class Metadata(PickledRecord):
    """All of the file."""


class TensorEntry(PickledRecord):
    """A tensor: properties, size, chunks."""


class BytesEntry(PickledRecord):
    """An object that was pickled by itself."""


class Chunk(PickledRecord):
    """A box of a tensor: offsets, sizes."""


class Properties(PickledRecord):
    """Of a tensor; a tuple whose first is the dtype."""


class Place(PickledRecord):
    """Key of the storage table: fqn, offset."""


class Stored(PickledRecord):
    """Value of the storage table: relative_path, offset, length, transform_descriptors."""


_METADATA = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KNOWN: dict[tuple[str, str], type] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorEntry,
    (_METADATA, "BytesStorageMetadata"): BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): Place,
    (_METADATA, "StorageMeta"): PickledRecord,
    (_METADATA, "_MEM_FORMAT_ENCODING"): PickledRecord,
    (_BEFORE_2_3, "TensorProperties"): Properties,
    (_BEFORE_2_3, "MEM_FORMAT_ENCODING"): PickledRecord,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Stored,
    ("torch.serialization", "_get_layout"): PickledRecord,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{(module, name): PickledRecord for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KNOWN_DTYPES}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _KNOWN:
            raise CheckpointError(
                f"{self._where}: it asks for {module}.{name}, which is no part of the metadata of a "
                "torch.distributed.checkpoint; nothing was run. Do not load this file with anything else"
            )
        return _KNOWN[module, name]

    def persistent_load(self, reference: Any) -> Any:
        raise CheckpointError(f"{self._where}: it asks for an object that is kept elsewhere, {reference!r}")


def read_metadata(data: bytes, where: str) -> Metadata:
    """The records of ``.metadata``.

    Raises:
        CheckpointError: It asks for a class that does not belong there; the message names it.
        DamagedCheckpointError: It is not such a pickle at all.
    """
    try:
        found = _Unpickler(data, where).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails in any way that the code of its opcodes can fail
        raise DamagedCheckpointError(where, f"not whole: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise DamagedCheckpointError(
            where, f"expected the metadata of a checkpoint, got {type(found).__name__}"
        )
    return found
