"""Documents to packed batches, in an order that any number of ranks can resume. See `docs/data.md`."""

from fsdmoe.data.batch import Batch
from fsdmoe.data.config import DataConfig, SourceConfig, require_holdout
from fsdmoe.data.pipeline import check_batch
from fsdmoe.data.sources import check_data
from fsdmoe.data.stream import DataStream, DocumentSpan, build_data

__all__ = [
    "Batch",
    "DataConfig",
    "DataStream",
    "DocumentSpan",
    "SourceConfig",
    "build_data",
    "check_batch",
    "check_data",
    "require_holdout",
]
