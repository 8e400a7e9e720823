"""The data set of a run, the same on all ranks."""

from __future__ import annotations

from typing import Any

from fsdmoe.core.all_ranks import require_alike
from fsdmoe.data import DataConfig, DataStream, build_data


def open_data(config: DataConfig, **options: Any) -> DataStream:
    """:func:`fsdmoe.data.build_data`, with its options, on every rank. Collective.

    Raises:
        ConfigError: On all ranks, where the files of some hold other documents than those of others: steps
            would repeat documents and skip others.
    """
    data = build_data(config, **options)
    require_alike({"data": data.fingerprint}, "give all nodes the same documents")
    return data
