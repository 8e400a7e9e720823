"""Files to documents: text, or the messages of a chat. Whatever cannot be read is named by file and line.

Documents without text are left out and counted, since there is nothing to learn from them; so are records
that cannot be read, with ``data.on_error = "skip"``.
"""

from __future__ import annotations

import gzip
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.chat_records import (
    FIELDS,
    OPTIONAL_FIELDS,
    OTHER_FORMS,
    Content,
    parse_record,
    texts_of,
    with_messages,
    without_nulls,
)
from fsdmoe.data.config import OnError, SourceConfig, source_name
from fsdmoe.data.files import SourceFile

_BLOCK_BYTES = 1 << 22


class Record(NamedTuple):
    """One document as read."""

    file_number: int
    content: Content


class Dropped:
    """What was left out of a source: how much by reason, and what the first of each was."""

    def __init__(self, on_error: OnError = "stop") -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}
        self._on_error = on_error

    def add(self, reason: str, what: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, what)

    def add_error(self, error: ConfigError) -> None:
        """A record that cannot be read: left out, or the end of the run."""
        if self._on_error == "stop":
            hint = ' (data.on_error = "skip" leaves such records out and counts them)'
            raise ConfigError(*(f"{problem}{hint}" for problem in error.problems)) from error
        self.add("records that cannot be read", str(error))

    def __str__(self) -> str:
        found = [
            f"{count:,} {reason} (the first: {self.first[reason]})" for reason, count in self.counts.items()
        ]
        return "; ".join(found)


def read_documents(
    key: str, source: SourceConfig, files: list[SourceFile], dropped: Dropped | None = None
) -> Iterator[Record]:
    """Every document of a source, in order, up to `max_bytes` of text. `dropped` gets what is left out."""
    num_bytes, dropped = 0, dropped or Dropped()
    # A dataset is read as one, whatever files it lies in.
    paths = [Path(source.dataset)] if source.dataset else [file.path for file in files]
    for number, path in enumerate(paths):
        for content in _read_file(key, source, path, dropped):
            yield Record(number, content)
            if source.max_bytes is not None:
                num_bytes += sum(len(text.encode()) for text in texts_of(content))
                if num_bytes >= source.max_bytes:
                    return


def first_document(key: str, source: SourceConfig, files: list[SourceFile], dropped: Dropped) -> Content:
    """Refuses files that are not of the source's kind, as far as their first document tells. A text file may
    be larger than memory, so its first line stands for it."""
    if source.kind == "text" and not source.separator and not source.dataset:
        source = replace(source, separator="\n")
    first = next(read_documents(key, source, files, dropped), None)
    if first is None:
        raise no_documents(key, source, dropped)
    return first.content


def no_documents(key: str, source: SourceConfig, dropped: Dropped) -> ConfigError:
    """The error of a source that has none."""
    left_out = f" ({dropped} left out)" if dropped.counts else ""
    return ConfigError(f"{key}.path: {source_name(source)} has no documents{left_out}; give some text")


def _read_file(key: str, source: SourceConfig, path: Path, dropped: Dropped) -> Iterator[Content]:
    if source.kind in ("text", "python-stdlib") and not source.dataset:
        for text in _read_text(key, path, source.separator, dropped):
            if text:
                yield text
            else:
                dropped.add("empty documents", str(path))
        return
    is_chat = source.kind in FIELDS
    field = source.field or ("messages" if is_chat else "text")
    needed = FIELDS[source.kind] if is_chat and source.kind != "chat" else (field,)
    wanted = (*needed, *OPTIONAL_FIELDS, *OTHER_FORMS) if is_chat else needed
    for where, raw in _read_records(key, source, path, wanted):
        try:
            record = _checked_record(key, where, raw, needed)
            content = _chat(key, where, source.kind, record, field) if is_chat else record[field]
            content = content if is_chat else _text(key, where, content, field)
        except ConfigError as error:
            dropped.add_error(error)
            continue
        if content:
            yield content
        else:
            dropped.add("records without text", where)


def _chat(key: str, where: str, kind: str, record: dict[str, Any], field: str) -> Content:
    content = parse_record(key, where, kind, record, field)
    _check_characters(key, where, "".join(texts_of(content)))
    return content


def _text(key: str, where: str, value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{key}.field: {where}: expected text in {field!r}, got {_kind_of(value)}; fix or remove "
            "the record"
        )
    _check_characters(key, where, value)
    return value


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path, "rb"))
    return path.open("rb")


def _read_text(key: str, path: Path, separator: str, dropped: Dropped) -> Iterator[str]:
    """A text file, whole or cut at the separator, empty documents included (what follows the last separator
    aside), without those that are no text. Read in blocks, so that a file may be larger than memory."""
    try:
        with _open(path) as file:
            for document in _cut(file, separator.encode()):
                try:
                    yield document.decode()
                except UnicodeDecodeError as error:
                    dropped.add_error(
                        ConfigError(
                            f"{key}.path: {path} is not UTF-8 text ({error.reason}); convert it, or leave it "
                            f"out with {key}.glob"
                        )
                    )
    except (OSError, EOFError) as error:
        raise ConfigError(f"{key}.path: cannot read {path} ({error}); check the file") from error


def _cut(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    if not separator:
        yield file.read()
        return
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        *documents, rest = (rest + block).split(separator)
        yield from documents
    if rest:
        yield rest


def _read_lines(key: str, path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file of records, not parsed yet: each may be skipped by itself."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, EOFError) as error:
        raise ConfigError(f"{key}.path: cannot read {path} ({error}); check the file") from error


def _read_records(
    key: str, source: SourceConfig, path: Path, wanted: tuple[str, ...]
) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Lines of JSON, not parsed yet, or rows of a table, each with its place."""
    # Optional dependencies: imported only when chosen.
    if source.dataset:
        from fsdmoe.data.hf_dataset import dataset_records

        yield from dataset_records(key, source)
    elif source.kind == "parquet" or (source.kind in FIELDS and path.suffix == ".parquet"):
        from fsdmoe.data.parquet import read_rows

        for number, row in enumerate(read_rows(key, path, wanted)):
            yield f"{path}, row {number}", row
    else:
        yield from _read_lines(key, path)


def _checked_record(
    key: str, where: str, raw: bytes | dict[str, Any], needed: tuple[str, ...]
) -> dict[str, Any]:
    """A record that has the needed fields."""
    try:
        record = json.loads(raw) if isinstance(raw, bytes) else raw
    except ValueError as error:
        is_array = where.endswith(":1") and isinstance(raw, bytes) and raw.lstrip().startswith(b"[")
        fix = _one_a_line(where) if is_array else "fix or remove the line"
        if not is_array and where.endswith(":1"):
            fix = f'write one JSON object a line, or set {key}.kind = "text" if it is prose'
        raise ConfigError(f"{key}.path: {where}: not JSON ({error}); {fix}") from error
    if not isinstance(record, dict):
        is_array = where.endswith(":1") and isinstance(record, list)
        fix = _one_a_line(where) if is_array else "fix or remove the line"
        raise ConfigError(f"{key}.path: {where}: expected a JSON object, got {_kind_of(record)}; {fix}")
    if needed == FIELDS["chat"]:
        record = with_messages(record)
    missing = [field for field in needed if field not in record]
    if missing:
        raise ConfigError(
            f"{key}.field: {where}: no {missing[0]!r} in the record, which has "
            f"{', '.join(record) or 'nothing'}; {_fix(key, record, needed)}"
        )
    return record if isinstance(raw, bytes) else {name: without_nulls(record[name]) for name in record}


def _one_a_line(where: str) -> str:
    """For a file that is one JSON array."""
    path = where.rpartition(":")[0]
    unpacked = Path(path.removesuffix(".gz"))
    # Not the file itself, which `>` would empty.
    other = f"{unpacked.stem}{'.lines' if unpacked.suffix == '.jsonl' else ''}.jsonl"
    command = f"jq -c '.[]' {shlex.quote(path)}"
    if path.endswith(".gz"):
        command = f"gzip -dc {shlex.quote(path)} | jq -c '.[]'"
    return f"write one object a line, not an array of them: {command} > {shlex.quote(other)}"


def _fix(key: str, record: dict[str, Any], needed: tuple[str, ...]) -> str:
    """What was meant by a record without the needed fields."""
    fitting = [kind for kind, names in FIELDS.items() if set(names) <= record.keys() and names != needed]
    if fitting and len(needed) == 1:
        return f'set {key}.kind = "{fitting[-1]}"'
    if needed != FIELDS["chat"] and "messages" in with_messages(record):
        return f'set {key}.kind = "chat"'
    has_list = any(isinstance(value, list) for value in record.values())
    if {"instruction", "output"} <= record.keys() or (needed == FIELDS["chat"] and not has_list):
        return "write its turns as `messages`, a list of `role` and `content`"
    return f"set {key}.field to the right one" if len(needed) == 1 else "fix or remove the record"


def _check_characters(key: str, where: str, text: str) -> None:
    """JSON can spell half a character (a lone surrogate), which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{key}.path: {where}: not valid Unicode ({error.reason}); fix or remove the record"
        ) from error


def _kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__
