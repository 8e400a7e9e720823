"""Tokenised documents on disk: written once, in order, then read at random. The index is memory-mapped.

A store is a folder. Nothing in it is pickled, all numbers are little-endian:

    tokens.bin    every document's token ids, end to end (uint16 or uint32); absent when they lie elsewhere
    offsets.bin   int64 [N + 1]  document d is tokens [offsets[d], offsets[d + 1])
    hashes.bin    uint64 [N]     decides which documents are held out
    targets.bin   uint8 [tokens] 1 where a token carries loss; absent when every token does. A pair of answers
                                 is one document: 2 where the second begins
    meta.json     dtype, counts, content fingerprint, the size of each file; written last
"""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdmoe.data.spans import IntArray
from fsdmoe.data.token_file import TokenFile, file_opener

META = "meta.json"
SECOND_BEGINS = 2
"""The target of the first token of a pair's second answer."""
Tokens = TokenFile | npt.NDArray[Any]


@dataclass(frozen=True)
class TokenStore:
    """Random access to the documents of one source."""

    name: str
    fingerprint: str
    """Names the content (token ids, boundaries, targets), wherever and under whatever path it lies."""
    offsets: IntArray
    hashes: npt.NDArray[np.uint64]
    shards: tuple[Tokens, ...]
    """Token arrays which, end to end, are the space that `offsets` counts in; no document crosses two of
    them."""
    shard_starts: tuple[int, ...] = (0,)
    targets: Tokens | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Records that are not in it, by reason."""
    without_loss: str = ""
    """How many records have no token with loss, and where the first is; empty where all have one."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def keeps_whole(self) -> bool:
        """Whether rows hold its documents whole: what carries loss is learnt with what comes before it."""
        return self.targets is not None

    def lengths(self, documents: IntArray) -> IntArray:
        """Token counts of the given documents."""
        return self.offsets[documents + 1] - self.offsets[documents]

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop) of a document; fewer where the document ends before."""
        base = int(self.offsets[document])
        stop = min(base + stop, int(self.offsets[document + 1]))
        shard = bisect.bisect_right(self.shard_starts, base) - 1
        origin = self.shard_starts[shard]
        return self.shards[shard][base + start - origin : stop - origin]

    def read_targets(self, document: int, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        """For the same range, which tokens carry loss; None when all do."""
        if self.targets is None:
            return None
        base = int(self.offsets[document])
        return self.targets[base + start : min(base + stop, int(self.offsets[document + 1]))]


class StoreWriter:
    """Writes a store document by document, holding no more than a few megabytes."""

    _FLUSH_DOCUMENTS = 1 << 16

    def __init__(self, folder: Path, *, dtype: str, with_targets: bool) -> None:
        self.folder = folder
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self.num_targets = 0
        self._digest = hashlib.blake2b(self.dtype.str.encode(), digest_size=16)
        self._tokens = (folder / "tokens.bin").open("wb", buffering=1 << 20)
        self._targets = (folder / "targets.bin").open("wb", buffering=1 << 20) if with_targets else None
        self._offsets_file = (folder / "offsets.bin").open("wb")
        self._hashes_file = (folder / "hashes.bin").open("wb")
        self._offsets = array("q", [0])
        self._hashes = array("Q")

    def add(self, tokens: npt.NDArray[Any], targets: npt.NDArray[np.uint8] | None = None) -> None:
        """Append one document, which has at least one token."""
        raw = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        content = hashlib.blake2b(raw, digest_size=8).digest()
        self._tokens.write(raw)
        self._digest.update(len(raw).to_bytes(8, "little") + raw)
        if self._targets is not None:
            assert targets is not None, "a store with targets needs them for every document"
            self._targets.write(targets.tobytes())
            self._digest.update(targets.tobytes())
            self.num_targets += int((targets == 1).sum())
        self.num_documents += 1
        self.num_tokens += len(tokens)
        self._offsets.append(self.num_tokens)
        self._hashes.append(int.from_bytes(content, "little"))
        if len(self._hashes) >= self._FLUSH_DOCUMENTS:
            self._flush_index()

    def close(self, facts: Mapping[str, Any] | None = None) -> None:
        """Finish the files and describe them in meta.json, with further facts about them."""
        self._flush_index()
        for file in (self._tokens, self._targets, self._offsets_file, self._hashes_file):
            if file is not None:
                file.close()
        meta = {"dtype": self.dtype.str, "fingerprint": self._digest.hexdigest(), **(facts or {})}
        write_meta(self.folder, meta)

    def _flush_index(self) -> None:
        self._offsets_file.write(np.asarray(self._offsets, dtype="<i8").tobytes())
        self._hashes_file.write(np.asarray(self._hashes, dtype="<u8").tobytes())
        self._offsets, self._hashes = array("q"), array("Q")


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Describe the files of a store: their sizes show whether a store is whole."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != META}
    (folder / META).write_text(json.dumps({**meta, "files": sizes}, indent=1))


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The description of a store, or None where the folder is missing, damaged or not a store."""
    try:
        meta = json.loads((folder / META).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole else None


def open_store(folder: Path, *, name: str, shards: Sequence[Tokens] = ()) -> TokenStore:
    """Open a store's files. `shards` are the token arrays of a store that has no tokens of its own."""
    meta = read_meta(folder)
    if meta is None:
        raise AssertionError(f"{folder} is not a whole token store")
    has_targets = "targets.bin" in meta["files"]
    opener = file_opener()
    arrays = tuple(shards) or (TokenFile(folder / "tokens.bin", meta["dtype"], opener),)
    starts = np.cumsum([0, *(len(shard) for shard in arrays[:-1])])
    return TokenStore(
        name=name,
        fingerprint=meta["fingerprint"],
        offsets=_map_array(folder / "offsets.bin", "<i8"),
        hashes=_map_array(folder / "hashes.bin", "<u8"),
        shards=arrays,
        shard_starts=tuple(int(start) for start in starts),
        targets=TokenFile(folder / "targets.bin", "u1", opener) if has_targets else None,
        dropped=meta.get("dropped", {}),
        without_loss=meta.get("without_loss", ""),
    )


def _map_array(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A raw file as a read-only array; a plain view, since `np.memmap` objects are slow to index."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
