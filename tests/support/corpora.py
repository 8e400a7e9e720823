"""Small data sets for the tests: in memory where only the order matters, on disk where reading does."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdmoe.data.config import DataConfig, SourceConfig
from fsdmoe.data.pipeline import Shape
from fsdmoe.data.store import TokenStore
from fsdmoe.data.stream import DataStream

VOCAB_SIZE = 1 << 30


def memory_store(
    name: str, lengths: Sequence[int], *, first_token: int = 0, hashes: Any = None
) -> TokenStore:
    """A store whose token ids all differ: a token says which document it is from and where it stood."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    digest = hashlib.blake2b(f"{name}{list(lengths)}".encode(), digest_size=16).hexdigest()
    if hashes is None:
        content = (
            hashlib.blake2b(f"{name}{i}".encode(), digest_size=8).digest() for i in range(len(lengths))
        )
        hashes = [int.from_bytes(h, "little") for h in content]
    tokens = np.arange(first_token, first_token + int(offsets[-1]), dtype=np.int64)
    return TokenStore(name, digest, offsets, np.array(hashes, dtype=np.uint64), (tokens,))


def memory_stores(lengths: Sequence[Sequence[int]]) -> list[TokenStore]:
    """Several such stores, with token ids that differ among them too."""
    firsts = itertools.accumulate([0, *(sum(one) for one in lengths)])
    return [
        memory_store(f"source{i}", one, first_token=first)
        for i, (one, first) in enumerate(zip(lengths, firsts, strict=False))
    ]


def memory_config(weights: Sequence[float], **keys: Any) -> DataConfig:
    """A section that fits `memory_stores`; nothing runs in the background unless asked for."""
    sources = tuple(SourceConfig(path=f"source{i}", weight=weight) for i, weight in enumerate(weights))
    return DataConfig(**{"sources": sources, "prefetch": 0, "holdout": 0.0, "seq_len": 8, **keys})


def open_streams(
    stores: Sequence[TokenStore],
    config: DataConfig,
    *,
    ranks: int,
    rows: int = 12,
    micro: int = 1,
    seed: int = 0,
) -> list[DataStream]:
    """The streams of all data-parallel ranks, in one process."""
    shapes = [
        Shape(
            dp_rank=r, dp_size=ranks, micro_batch_size=micro, global_batch_size=rows, seq_len=config.seq_len
        )
        for r in range(ranks)
    ]
    return [DataStream(stores, VOCAB_SIZE, config, shape, seed) for shape in shapes]


def take_steps(streams: Sequence[DataStream], num_steps: int) -> list[list[Any]]:
    """What all ranks consumed in each of the next steps: (document spans, rows of tokens), in order."""
    steps = []
    for _ in range(num_steps):
        batches = [batch for stream in streams for batch in stream.next_step()]
        spans = [span for stream in streams for span in stream.consumed_documents()]
        tokens = [row for batch in batches for row in batch.tokens_BS.tolist()]
        steps.append([spans, tokens])
    return steps


def tokens_of(steps: Sequence[Sequence[Any]]) -> list[int]:
    """All tokens of some steps, in global order."""
    return [token for _, rows in steps for row in rows for token in row]
