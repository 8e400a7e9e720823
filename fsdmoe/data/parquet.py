"""Rows of a Parquet file. The only file that imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdmoe.core.errors import ConfigError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError("data.kind: reading Parquet needs `pyarrow`; pip install 'fsdmoe[data]'") from error

_ROWS_AT_ONCE = 4096


def read_rows(key: str, path: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The wanted columns of each row, as far as there are any, a few thousand rows in memory at a time."""
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in wanted]
            if not columns:
                raise ConfigError(
                    f"{key}.field: {path}: no column {wanted[0]!r}, it has {', '.join(names)}; set "
                    f"{key}.field to the right one"
                )
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{key}.path: {path} is not readable as Parquet ({error}); check the file"
        ) from error
