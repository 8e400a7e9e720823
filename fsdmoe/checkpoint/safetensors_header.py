"""The header of a safetensors file, held to everything that the format demands.

A header is only trusted once the tensors it names lie one behind another, without gap or overlap, from the
first byte of the data to the last, each exactly as long as its shape and dtype say. Otherwise a crafted or
damaged file could hand out one tensor's bytes as another's weights::

    | length: 8 bytes | header: JSON, padded with spaces | a ........ | b .... | c ............ |
                                                         0           a's end  b's end          end of the file

The safetensors library holds local files to the same rules; this reads object stores too, and never a byte
of the data.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdmoe.checkpoint.dtypes import dtype_name, dtype_named
from fsdmoe.checkpoint.tree import Tree

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_MAX_ELEMENTS = 1 << 63
_ALIGNMENT = 64


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file; ``start`` and ``end`` count from the first byte behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def build_header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], content: str = ""
) -> tuple[bytes, list[int]]:
    """The header of a file of these tensors (name, dtype, shape) in this order, and where each begins in the
    file; ``content`` is said in it for people."""
    document: Tree = {"__metadata__": {"format": "pt"} | ({"content": content} if content else {})}
    starts = [0]
    for name, dtype, shape in tensors:
        end = starts[-1] + math.prod(shape) * dtype.itemsize
        document[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": list(shape),
            "data_offsets": [starts[-1], end],
        }
        starts.append(end)
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts[:-1]]


def parse_header(text: bytes, data_bytes: int, where: str) -> dict[str, HeaderEntry]:
    """The tensors of a file whose data has ``data_bytes`` bytes, in the order in which they lie.

    ``ValueError`` says what is wrong, with the tensor; a dtype that this version does not know is a
    ``CheckpointError``. ``where`` names the file in that one.
    """
    if not text.startswith(b"{"):
        raise ValueError("its header does not begin with '{'")
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    _check_metadata(document.pop("__metadata__", None))
    found = {name: _entry(name, value, where) for name, value in document.items()}
    found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))
    for (one, first), (other, second) in itertools.pairwise(found.items()):
        if second.start < first.end:
            raise ValueError(
                f"{one} and {other} share bytes: {_place(first)} and {_place(second)} of the data"
            )
    at, before = 0, "the header"
    for name, entry in found.items():
        if entry.start != at:
            raise ValueError(f"a gap of {entry.start - at} bytes between {before} and {name} {_place(entry)}")
        at, before = entry.end, name
    if at != data_bytes:
        raise ValueError(f"its tensors end at byte {at} of the data, which has {data_bytes}")
    return found


def _entry(name: str, value: Any, where: str) -> HeaderEntry:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, got {value!r}")
    kind, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str):
        raise ValueError(f"{name}: expected the name of a dtype, got {kind!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise ValueError(f"{name}: expected a shape of whole numbers from 0, got {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{name}: expected two data_offsets, whole numbers from 0, got {offsets!r}")
    dtype = dtype_named(kind, f"{where}: {name}")
    wanted = math.prod(shape) * dtype.itemsize
    if math.prod(n for n in shape if n) >= _MAX_ELEMENTS:
        raise ValueError(f"{name}: {shape} has more elements than can be counted")
    if offsets[1] - offsets[0] != wanted:
        raise ValueError(
            f"{name}: {kind} of shape {shape} takes {wanted} bytes, its data_offsets {offsets} hold "
            f"{offsets[1] - offsets[0]}"
        )
    return HeaderEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _place(entry: HeaderEntry) -> str:
    return f"[{entry.start}, {entry.end})"


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ELEMENTS  # True is an int too, and 2.0 is not a size


def _check_metadata(value: Any) -> None:
    texts = {} if value is None else value
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("__metadata__: expected an object of texts")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found
