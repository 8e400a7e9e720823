"""Files of routing decisions, keyed by document and position. Nothing in them is pickled.

A file is safetensors, with one entry in its header::

    fsdmoe-routing-2   {"num_experts": 64, "segments": [["corpus/12", 0, 500], ["corpus/12", 730, 20], ...]}

A segment is a range of positions of one document: its name, the first position, how many. Segment after
segment, a row a token:

===========  =================  ==============================================================================
``ids``      int [N, L, K]      experts that the token chose in each MoE layer; -1 for none
``weights``  float32 [N, L, K]  optional: what it weighed them by
``kept``     bool [N, L, K]     optional: which choices capacity let through; without it, all
===========  =================  ==============================================================================

A recording is such a file or a folder of them; each (document, position) stands in it once.

Legend: N tokens of a file, T tokens asked for, L MoE layers of the model in order, K choices a token.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.origin import Origin

_FORMAT = "fsdmoe-routing-2"  # also the only metadata key: with several, their order would vary
_SUFFIX = ".safetensors"
_COLUMNS = ("ids", "weights", "kept")


class RecordedSpan(NamedTuple):
    """Consecutive positions of a document, and the row of the first of them."""

    document: str
    first: int
    num_tokens: int
    row: int


class RoutingTable(NamedTuple):
    """The decisions of one file, or of a tape in memory."""

    num_experts: int
    segments: tuple[RecordedSpan, ...]
    tensors: Mapping[str, Tensor]
    """``ids``, perhaps ``weights`` and ``kept``."""

    @classmethod
    def build(cls, num_experts: int, origin: Origin, columns: Mapping[str, Tensor]) -> RoutingTable:
        """From tokens ``[T]`` in any order and columns ``[T, L, K]``; padding is left out. A ConfigError
        where a token is there twice."""
        order = np.lexsort((origin.offset.numpy(), origin.document.numpy()))
        order = order[origin.document.numpy()[order] >= 0]
        document, offset = origin.document.numpy()[order], origin.offset.numpy()[order]
        follows = (np.diff(document) == 0) & (np.diff(offset) <= 1)
        again = np.flatnonzero((np.diff(document) == 0) & (np.diff(offset) == 0))
        if again.size:
            where = int(again[0])
            raise _twice("this step", "this step", origin.names[document[where]], int(offset[where]))
        starts = np.flatnonzero(np.concatenate(([True], ~follows))) if len(order) else np.zeros(0, np.int64)
        counts = np.diff(starts, append=len(order))
        segments = [
            RecordedSpan(origin.names[document[start]], int(offset[start]), int(count), int(start))
            for start, count in zip(starts, counts, strict=True)
        ]
        rows = torch.from_numpy(order)
        return cls(num_experts, tuple(segments), {name: column[rows] for name, column in columns.items()})

    def write(self, path: Path) -> None:
        """Whole or not at all: a name that ends like a recording's is a whole file."""
        listed = [segment[:3] for segment in self.segments]
        header = json.dumps({"num_experts": self.num_experts, "segments": listed})
        tensors = {name: column.contiguous() for name, column in self.tensors.items()}
        small = torch.int16 if self.num_experts < 1 << 15 else torch.int32
        tensors["ids"] = tensors["ids"].to(small)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        save_file(tensors, unfinished, {_FORMAT: header})
        os.replace(unfinished, path)


def save_routed_experts(
    path: str | Path,
    requests: Mapping[str, Any],
    *,
    num_experts: int,
    layers: Iterable[int] | None = None,
) -> None:
    """Write what an inference engine returned: by request, the experts of its tokens ``[tokens, layers, K]``,
    from the first token of the prompt on (vLLM's ``routed_experts``).

    Args:
        path: The file to write; its name ends with ``.safetensors``.
        requests: Arrays or tensors by request; the request is the document that replay asks for.
        num_experts: Of each MoE layer.
        layers: Which of the arrays' layers are MoE layers, where others are in them too
            (``CausalLM.moe_layers()``); None takes all.
    """
    chosen = None if layers is None else list(layers)
    segments: list[RecordedSpan] = []
    parts: list[Tensor] = []
    for name, given in requests.items():
        ids_NLK = torch.as_tensor(np.asarray(given).astype(np.int64))
        where = f"routed_experts: request {name!r}"
        if ids_NLK.ndim != 3 or not ids_NLK.numel():
            raise ConfigError(f"{where}: expected [tokens, layers, k], got shape {list(ids_NLK.shape)}")
        if chosen is not None:
            if max(chosen) >= ids_NLK.shape[1]:
                raise ConfigError(
                    f"{where}: expected layers up to {max(chosen)}, got {ids_NLK.shape[1]} layers; pass the "
                    "numbers of this model's MoE layers"
                )
            ids_NLK = ids_NLK[:, chosen]
        if parts and ids_NLK.shape[1:] != parts[0].shape[1:]:
            raise ConfigError(
                f"{where}: expected [tokens, {parts[0].shape[1]}, {parts[0].shape[2]}] as the others have, "
                f"got {list(ids_NLK.shape)}"
            )
        origin = Origin(
            (str(name),), torch.zeros(len(ids_NLK), dtype=torch.int64), torch.arange(len(ids_NLK))
        )
        _check_ids(ids_NLK, num_experts, str(path), origin)
        segments.append(RecordedSpan(name, 0, len(ids_NLK), sum(map(len, parts))))
        parts.append(ids_NLK)
    if not parts:
        raise ConfigError("routed_experts: expected at least one request, got none")
    RoutingTable(num_experts, tuple(segments), {"ids": torch.cat(parts)}).write(Path(path))


class Recording:
    """Decisions by document and position, from one table or a folder of files, which are read as they are
    asked for."""

    def __init__(self, tables: Mapping[str, RoutingTable]) -> None:
        self._tables = tables
        self._files = tuple(tables)
        self._documents: dict[str, list[tuple[int, RecordedSpan]]] = {}
        for number, table in enumerate(tables.values()):
            for segment in table.segments:
                self._documents.setdefault(segment.document, []).append((number, segment))
        self._sort()
        first = next(iter(tables.values()))
        self.num_experts, self.top_k = first.num_experts, first.tensors["ids"].shape[2]

    @classmethod
    def open(cls, path: str | Path) -> Recording:
        """A file, or all files of a folder; ConfigError where one of them is no recording."""
        path = Path(path).expanduser()
        files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"replay: expected files *{_SUFFIX} in {str(path)!r}, got none; record first")
        # Of this recording alone: another one may find other files under the same names.
        opened = functools.lru_cache(maxsize=32)(_open_tensors)
        tables = {str(file): _read_table(file, opened) for file in files}
        # A column that only some files have would be zeros for the tokens of the others.
        kinds = {(table.num_experts, *sorted(table.tensors)): file for file, table in tables.items()}
        if len(kinds) > 1:
            found = (f"{kind[0]} experts and {', '.join(map(str, kind[1:]))}" for kind in kinds)
            raise ConfigError(
                f"replay: expected files of one recording, got {'; '.join(found)} in "
                f"{' and '.join(kinds.values())}; keep each recording in a folder of its own"
            )
        return cls(tables)

    def columns(self, origin: Origin) -> dict[str, Tensor]:
        """Of tokens ``[T]``: ``ids [T, L, K]``, and what else was recorded. Padding has -1 throughout."""
        file_T, row_T = self._locate(origin)
        found: dict[str, Tensor] = {}
        for number in np.unique(file_T[file_T >= 0]).tolist():
            name, table = self._files[number], self._tables[self._files[number]]
            here = torch.from_numpy(np.flatnonzero(file_T == number))
            rows = torch.from_numpy(row_T)[here]
            for kind, column in table.tensors.items():
                part = column[rows]
                if kind == "ids":
                    part = part.long()
                    own = origin.map(functools.partial(torch.take, index=here))
                    _check_ids(part, self.num_experts, name, own)
                empty = part.new_full((len(row_T), *part.shape[1:]), -1 if kind == "ids" else 0)
                found.setdefault(kind, empty)
                if found[kind].shape[1:] != part.shape[1:]:
                    raise ConfigError(
                        f"replay: {name} has {kind} {list(part.shape[1:])} a token, others "
                        f"{list(found[kind].shape[1:])}; keep each recording in a folder of its own"
                    )
                found[kind][here] = part
        return found

    def loads(self) -> Tensor:
        """``[S, L, E]``: choices of each expert in each layer, by step: files of one step, as
        ``experts.record`` names them, count together."""
        found: dict[str, Tensor] = {}
        for file, table in self._tables.items():
            ids_LN = table.tensors["ids"].long().movedim(1, 0).flatten(1)
            if (ids_LN >= self.num_experts).any():
                raise ConfigError(
                    f"replay: {file}: expected experts below {self.num_experts}; record it again"
                )
            places = torch.where(ids_LN < 0, self.num_experts, ids_LN)
            loads_LE = places.new_zeros(len(ids_LN), self.num_experts + 1)
            loads_LE.scatter_add_(1, places, torch.ones_like(places))
            step = Path(file).name.partition("-rank-")[0]
            found[step] = found.get(step, 0) + loads_LE[:, :-1]
        return torch.stack(list(found.values()))

    def _locate(self, origin: Origin) -> tuple[np.ndarray, np.ndarray]:
        """File and row of every token; -1 for padding."""
        document_T, offset_T = origin.document.numpy(), origin.offset.numpy()
        file_T, row_T = np.full(len(document_T), -1), np.full(len(document_T), -1)
        for number in np.unique(document_T[document_T >= 0]).tolist():
            here = np.flatnonzero(document_T == number)
            known = self._documents.get(origin.names[number])
            if known is None:
                raise self._missing(origin.names[number], int(offset_T[here].min()))
            firsts, counts, rows, files = np.array([(s.first, s.num_tokens, s.row, f) for f, s in known]).T
            which = np.searchsorted(firsts, offset_T[here], side="right") - 1
            within = offset_T[here] - firsts[which]
            outside = (which < 0) | (within >= counts[which])
            if outside.any():
                raise self._missing(origin.names[number], int(offset_T[here][outside].min()))
            file_T[here], row_T[here] = files[which], rows[which] + within
        return file_T, row_T

    def _missing(self, document: str, position: int) -> ConfigError:
        files = (
            self._files[0] if len(self._files) == 1 else f"{self._files[0]} and {len(self._files) - 1} more"
        )
        return ConfigError(
            f"replay: nothing was recorded for document {document!r}, position {position} in {files}, which "
            f"hold {len(self._documents)} documents; replay recorded tokens only"
        )

    def _sort(self) -> None:
        """By position; a token that is there twice would be replayed by one of two decisions."""
        for document, known in self._documents.items():
            known.sort(key=lambda each: each[1].first)
            for (file, one), (other_file, other) in itertools.pairwise(known):
                if other.first < one.first + one.num_tokens:
                    raise _twice(self._files[file], self._files[other_file], document, other.first)


def _twice(file: str, other: str, document: str, position: int) -> ConfigError:
    where = file if file == other else f"{file} and {other}"
    return ConfigError(
        f"replay: expected every token once, got document {document!r}, position {position} twice in "
        f"{where}; record one epoch, each run into a folder of its own"
    )


def _check_ids(ids_NLK: Tensor, num_experts: int, file: str, origin: Origin) -> None:
    """Refuse experts that there are not, and one expert twice for a token."""
    outside_N = ((ids_NLK < -1) | (ids_NLK >= num_experts)).flatten(1).any(1)
    ordered = ids_NLK.sort(-1).values
    twice_N = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).flatten(1).any(1)
    for bad_N, what in ((outside_N, f"experts 0 to {num_experts - 1}"), (twice_N, "different experts")):
        if bad_N.any():
            token = int(bad_N.nonzero()[0])
            name, position = origin.names[int(origin.document[token])], int(origin.offset[token])
            raise ConfigError(
                f"replay: {file}: document {name!r}, position {position}: expected {what}, got "
                f"{ids_NLK[token].tolist()}"
            )


class _LazyTensors(Mapping[str, Tensor]):
    """The tensors of a file, opened when first asked for; few files stay open."""

    def __init__(self, path: Path, names: list[str], opened: Callable[[Path], dict[str, Tensor]]) -> None:
        self._path, self._names, self._opened = path, names, opened

    def __getitem__(self, name: str) -> Tensor:
        return self._opened(self._path)[name]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _open_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def _read_table(path: Path, opened: Callable[[Path], dict[str, Tensor]]) -> RoutingTable:
    """What a file's header says; its tensors are read when they are needed."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            kinds = {name: file.get_slice(name).get_dtype() for name in shapes}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"replay: {str(path)!r} is not readable as a recording: {error}; record it again"
        ) from error
    if _FORMAT not in metadata:
        raise ConfigError(
            f"replay: expected a file of format {_FORMAT}, got metadata {list(metadata)} in {str(path)!r}; "
            "pass what experts.record, RoutingTape.save or save_routed_experts wrote"
        )
    try:
        header = json.loads(metadata[_FORMAT])
        listed = [(str(name), int(first), int(count)) for name, first, count in header["segments"]]
        num_experts = int(header["num_experts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"replay: {str(path)!r} has a header that is none: {error!r}; record it again"
        ) from error
    num_rows, segments = 0, []
    for name, first, count in listed:
        if first < 0 or count < 1:
            raise ConfigError(
                f"replay: {str(path)!r}: document {name!r}, position {first}: expected a range of at least "
                f"one token from position 0 on, got {count}"
            )
        segments.append(RecordedSpan(name, first, count, num_rows))
        num_rows += count
    shape = shapes.get("ids", [])
    wrong = [name for name, own in shapes.items() if name in _COLUMNS and own != shape]
    if len(shape) != 3 or shape[0] != num_rows or wrong or not kinds["ids"].startswith("I"):
        raise ConfigError(
            f"replay: {str(path)!r}: expected ids of {num_rows} tokens [N, L, K], and weights and kept of "
            f"the same shape, got {shapes}; record it again"
        )
    return RoutingTable(
        num_experts,
        tuple(segments),
        _LazyTensors(path, [name for name in _COLUMNS if name in shapes], opened),
    )
