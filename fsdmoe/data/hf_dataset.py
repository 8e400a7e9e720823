"""Records of a dataset of the Hub, or of a folder on disk. The only file that imports `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.config import SourceConfig

try:
    import datasets
except ImportError as error:
    raise ImportError(
        "data.dataset: reading a dataset needs the `datasets` library; pip install 'fsdmoe[datasets]'"
    ) from error


def is_saved_dataset(name: str) -> bool:
    """Whether this is a folder that `save_to_disk` wrote, which is read where it lies."""
    folder = Path(name).expanduser()
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def dataset_files(key: str, source: SourceConfig) -> list[Path]:
    """The files that the dataset lies in, after a download where that is needed."""
    return [Path(file["filename"]) for file in _load(key, source).cache_files]


def dataset_records(key: str, source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, with its place."""
    for number, record in enumerate(_load(key, source)):
        yield f"{source.dataset}, row {number}", record


def _load(key: str, source: SourceConfig) -> datasets.Dataset:
    name = source.dataset
    try:
        if not is_saved_dataset(name):
            return datasets.load_dataset(name, source.subset or None, split=source.split)
        found = datasets.load_from_disk(str(Path(name).expanduser()))
    except Exception as error:  # of a network, of files, of the library: all mean that there is no dataset
        where = "on this disk" if Path(name).expanduser().exists() else "on this disk or by the Hub"
        raise ConfigError(
            f"{key}.dataset: cannot load {name!r} {where} ({type(error).__name__}: {error}); check the name, "
            f"{key}.subset and {key}.split; without a network, save_to_disk elsewhere and name the folder"
        ) from error
    if isinstance(found, datasets.Dataset) and source.split == "train":
        return found
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    if source.split not in splits:
        raise ConfigError(
            f"{key}.split: expected one of {', '.join(splits)}, which {name} has, got {source.split!r}; "
            "name one of them"
        )
    return splits[source.split]
