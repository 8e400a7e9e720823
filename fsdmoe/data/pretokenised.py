"""Files of token ids that were written beforehand. They are read in place; only an index is built.

The format, for a file `x.npy` or `x.bin`:

    x.npy           a one-dimensional integer array, as `numpy.save` writes it
    x.bin           the ids alone, little-endian uint16 or uint32 (`dtype`), no header
    x.offsets.npy   optional, next to it: int64, document d is ids [offsets[d], offsets[d + 1]); it starts
                    with 0 and ends with the number of ids
    otherwise       documents end after each `document_end` id; without that key a file is one document

No bos or eos is added. Documents of no tokens are passed over. The first start reads every id once, to know
the lowest and the highest (:func:`check_ids`). The content fingerprint is taken from the boundaries and from
64 blocks of 64 KiB spread over each file (all of it where it is smaller), and documents are held out by their
number: hashing everything would take hours.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import cache
from fsdmoe.data.cache import say
from fsdmoe.data.config import SourceConfig, TokenDtype, source_name
from fsdmoe.data.files import OFFSETS_SUFFIX, SourceFile
from fsdmoe.data.permutation import hash_indices
from fsdmoe.data.store import read_meta, write_meta
from fsdmoe.data.token_file import Opener, TokenFile, file_opener

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_SCAN_TOKENS = 1 << 24
_LOOK_TOKENS, _LEAST_TOKENS = 4096, 64

Extremes = dict[str, tuple[int, str]]
"""The lowest and the highest id, and where they stand."""


def open_tokens(key: str, source: SourceConfig, paths: Sequence[Path]) -> list[TokenFile]:
    """The files of a source, ready to be read."""
    opener = file_opener()
    return [_open_tokens(key, source, path, opener) for path in paths]


def _other_dtype(path: Path) -> str:
    fitting = [name for name in get_args(TokenDtype) if path.stat().st_size % np.dtype(name).itemsize == 0]
    return f"set it to {' or '.join(fitting)}" if fitting else "write the file anew: it was cut off"


def _open_tokens(key: str, source: SourceConfig, path: Path, opener: Opener) -> TokenFile:
    if path.suffix == ".bin":
        dtype = np.dtype(source.dtype).newbyteorder("<")
        if path.stat().st_size % dtype.itemsize:
            raise ConfigError(
                f"{key}.dtype: the size of {path} is no multiple of {dtype.itemsize} bytes, so it was not "
                f"written as {source.dtype}; {_other_dtype(path)}"
            )
        if dtype.itemsize == 2:
            _refuse_halves(key, path)
        return TokenFile(path, dtype.str, opener)
    if path.suffix != ".npy":
        raise ConfigError(
            f"{key}.path: expected .npy or .bin files of token ids, got {path}; set {key}.glob or rename it"
        )
    array = _load_npy(key, path)
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ConfigError(
            f"{key}.path: {path}: expected a one-dimensional array of integers, got {array.ndim} dims of "
            f"{array.dtype}; save the token ids end to end"
        )
    return TokenFile(path, array.dtype.str, opener, header_bytes=array.offset)


def offset_files(files: list[SourceFile]) -> list[SourceFile]:
    """The offsets files next to these files."""
    paths = [_offsets_path(file.path) for file in files]
    stats = [(path, path.stat()) for path in paths if path.exists()]
    return [SourceFile(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def index_tokens(
    folder: Path, key: str, source: SourceConfig, files: list[SourceFile], arrays: list[TokenFile]
) -> None:
    """Write the boundaries, hashes and description of a pre-tokenised source."""
    began = spoke = time.monotonic()
    digest = hashlib.blake2b(digest_size=16)
    num_documents, base = 0, 0
    extremes: Extremes = {}
    with (
        (folder / "offsets.bin").open("wb") as offsets_file,
        (folder / "hashes.bin").open("wb") as hashes_file,
    ):
        offsets_file.write(np.zeros(1, "<i8").tobytes())
        for file, array in zip(files, arrays, strict=True):
            ends = _document_ends(key, source, file.path, array)
            offsets_file.write((base + ends).astype("<i8").tobytes())
            hashes = hash_indices(num_documents, num_documents + len(ends), "held-out documents")
            hashes_file.write(hashes.astype("<u8").tobytes())
            digest.update(ends.astype("<i8").tobytes())
            for sample in _samples(array):
                digest.update(sample.astype("<i8").tobytes())
            num_documents, base = num_documents + len(ends), base + len(array)
            _note_extremes(extremes, file.path, array)
            if time.monotonic() - spoke > cache.SAY_EVERY_SECONDS:
                spoke = time.monotonic()
                say(f"checked {base / 1e9:.1f} G token ids of {source_name(source)}, up to {file.path.name}")
    if num_documents == 0:
        raise ConfigError(f"{key}.path: {source_name(source)} has no documents; give some tokens")
    write_meta(folder, {"dtype": "external", "fingerprint": digest.hexdigest(), "extremes": extremes})
    say(
        f"indexed {source_name(source)}: {num_documents:,} documents, {base:,} tokens "
        f"in {time.monotonic() - began:.1f} s"
    )


def check_ids(folder: Path, vocab_size: int) -> None:
    """Refuse an indexed source whose ids a vocabulary does not have, naming the file and the place."""
    meta = read_meta(folder)
    assert meta is not None
    _refuse_unknown_ids(meta["extremes"], vocab_size)


def check_first_ids(key: str, source: SourceConfig, files: list[SourceFile], vocab_size: int) -> None:
    """Refuse files that are no token ids, or whose first ones are outside of the vocabulary, without
    reading the rest."""
    arrays = open_tokens(key, source, [file.path for file in files])
    extremes: Extremes = {}
    for file, array in zip(files, arrays, strict=True):
        _document_ends(key, replace(source, document_end=None), file.path, array)
        if not extremes:
            _note_extremes(extremes, file.path, array[:_SCAN_TOKENS])
    _refuse_unknown_ids(extremes, vocab_size)


def _refuse_unknown_ids(extremes: Extremes, vocab_size: int) -> None:
    for number, where in extremes.values():
        if not 0 <= number < vocab_size:
            fix = f", or set data.vocab_size and model.vocab_size to {number + 1} or more" * (number >= 0)
            if number >= 2**16 and _fits_uint16(Path(where.rpartition(", token ")[0]), vocab_size):
                raise ConfigError(
                    f"data.dtype: {where} is {number} as uint32, which is no id of a vocabulary of "
                    f'{vocab_size}, but read as uint16 all are; set data.dtype = "uint16"'
                )
            raise ConfigError(
                f"data.vocab_size: expected token ids from 0 to {vocab_size - 1}, got {number} in {where}; "
                f"name the tokenizer that wrote them with data.tokenizer{fix}"
            )


def _fits_uint16(path: Path, vocab_size: int) -> bool:
    """Whether the first ids of a .bin file are those of the vocabulary if they have 16 bits each."""
    return path.suffix == ".bin" and bool((np.fromfile(path, "<u2", _LOOK_TOKENS) < vocab_size).all())


def _refuse_halves(key: str, path: Path) -> None:
    """Ids of 32 bits that are read as two of 16 have a zero in every second place."""
    ids = np.fromfile(path, "<u2", _LOOK_TOKENS)
    if len(ids) >= _LEAST_TOKENS and not ids[1::2].any() and ids[::2].any():
        raise ConfigError(
            f"{key}.dtype: every second id of {path} is 0 as uint16, so it was written as uint32; set "
            f'{key}.dtype = "uint32"'
        )


def _note_extremes(extremes: Extremes, path: Path, array: TokenFile | npt.NDArray[Any]) -> None:
    """The lowest and the highest id so far, and where they stand."""
    for first in range(0, len(array), _SCAN_TOKENS):
        part = array[first : first + _SCAN_TOKENS]
        for name, place in (("lowest", int(part.argmin())), ("highest", int(part.argmax()))):
            number, sign = int(part[place]), 1 if name == "highest" else -1
            if name not in extremes or sign * number > sign * extremes[name][0]:
                extremes[name] = number, f"{path}, token {first + place}"


def _document_ends(key: str, source: SourceConfig, path: Path, array: TokenFile) -> npt.NDArray[np.int64]:
    """Where each document of a file ends: ascending, without repeats, the last at the end of the file."""
    written = _offsets_path(path)
    if written.exists():
        offsets = np.asarray(_load_npy(key, written)).astype(np.int64)
        ordered = (
            offsets.ndim == 1 and offsets.size > 0 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
        )
        if not ordered or offsets[-1] != len(array):
            raise ConfigError(
                f"{key}.path: {written}: expected ascending offsets from 0 to {len(array)}, the number of "
                f"ids in {path.name}; write it again"
            )
        ends = offsets[1:]
    elif source.document_end is not None:
        found = [
            first + np.flatnonzero(array[first : first + _SCAN_TOKENS] == source.document_end)
            for first in range(0, len(array), _SCAN_TOKENS)
        ]
        ends = np.concatenate([*found, np.array([len(array) - 1], dtype=np.int64)]) + 1
    else:
        ends = np.array([len(array)], dtype=np.int64)
    return np.unique(ends[ends > 0])


def _offsets_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(path.suffix) + OFFSETS_SUFFIX)


def _samples(array: TokenFile) -> Iterator[npt.NDArray[Any]]:
    size = _SAMPLE_BYTES // array.dtype.itemsize
    if len(array) <= _NUM_SAMPLES * size:
        yield array[:]
        return
    for start in np.linspace(0, len(array) - size, _NUM_SAMPLES).astype(np.int64):
        yield array[start : start + size]


def _load_npy(key: str, path: Path) -> np.memmap:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(
            f"{key}.path: {path} is not a readable .npy file ({error}); write it with numpy.save"
        ) from error
