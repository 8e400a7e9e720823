"""Documents to packed batches, in an order that any number of ranks can resume. See `docs/data.md`."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.data.batch import Batch
    from fsdmoe.data.config import DataConfig, SourceConfig, check_batch, require_holdout
    from fsdmoe.data.sources import check_data
    from fsdmoe.data.stream import DataStream, DocumentSpan, build_data

__getattr__ = lazy_names(__name__, __file__)
