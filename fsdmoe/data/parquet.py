"""A column of a Parquet file. The only file that imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdmoe.errors import ConfigError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError("data.kind: reading Parquet needs `pyarrow`; pip install 'fsdmoe[data]'") from error

_ROWS_AT_ONCE = 4096


def read_column(key: str, path: Path, column: str) -> Iterator[Any]:
    """The values of one column, as Python objects, a few thousand rows in memory at a time."""
    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise ConfigError(
                    f"{key}.field: {path}: no column {column!r}, it has {names}; set {key}.field to the "
                    "right one"
                )
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column]):
                yield from batch.column(0).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{key}.path: {path} is not readable as Parquet ({error}); check the file"
        ) from error
