"""The stream of training steps that one data-parallel rank reads, and the position to save.

The path of a batch: `order.py` (which document next) -> `cursors.py` (which row) -> `pipeline.py` (whose row,
when) -> `packing.py` (the tensors) -> here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import state as saved
from fsdmoe.data.batch import Batch
from fsdmoe.data.cache import say
from fsdmoe.data.chunks import index_blocks
from fsdmoe.data.config import DataConfig, keyed_sources, require_holdout
from fsdmoe.data.cursors import RowPlanner, start_position
from fsdmoe.data.evaluation import EvalRows
from fsdmoe.data.holdout import Holdout
from fsdmoe.data.order import ChunkOrder
from fsdmoe.data.pipeline import Pipeline, Prepare, RowReader, Shape, Step
from fsdmoe.data.sources import open_sources
from fsdmoe.data.spans import NO_SOURCE
from fsdmoe.data.store import TokenStore

_MOST_CURSORS = 64
_ROWS_PER_PIECE = 16
_WHOLE_DOCUMENTS = 1 << 62


class DocumentSpan(NamedTuple):
    """Tokens [start, stop) of a document, as a rank has read them."""

    source: str
    document: int
    start: int
    stop: int


class SourceFacts(NamedTuple):
    """What a source holds, and how far it has been read."""

    name: str
    documents: int
    tokens: int
    weight: float
    """Its share of the mixture's tokens."""
    tokens_read: int
    epochs: float
    dropped: Mapping[str, int]
    """Records that were left out, by reason."""
    cut: int = 0
    """Chats and other records with a loss mask that are longer than a row. Text is cut anywhere."""
    without_loss: str = ""
    """How many records have no token with loss, and where the first is."""

    @property
    def cut_text(self) -> str:
        """The same in words; empty where rows cut none."""
        if self.cut == 0:
            return ""
        share = 100 * self.cut / self.documents
        return f"{self.cut:,} ({share:.1f} %) are longer than data.seq_len and are cut"


class DataStream:
    """Training steps for one data-parallel rank, evaluation batches, and the position to save."""

    def __init__(
        self,
        stores: Sequence[TokenStore],
        vocab_size: int,
        config: DataConfig,
        shape: Shape,
        seed: int,
        prepare: Prepare | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self._trains = trains
        self.stores = tuple(stores)
        self._config = config
        self._weights = tuple(float(source.weight) for _, source in keyed_sources(config))
        # Asked once: without a GPU, a torch that is built for them looks for its driver every time.
        pin_memory = config.pin_memory and torch.cuda.is_available()
        self._reader = RowReader(self.stores, shape, pin_memory, prepare)
        self._holdout = Holdout(stores, config.holdout)
        whole = _WHOLE_DOCUMENTS if not config.shuffle else _ROWS_PER_PIECE * config.seq_len
        self._order = self._build_order(config.piece_len or whole, seed, config.shuffle)
        self._position = start_position(len(stores), config.cursors or self._default_cursors())
        self._num_cut = tuple(_num_longer(store, shape.seq_len) for store in self.stores)
        self._steps = 0
        self._last_step: Step | None = None
        self._eval_rows: EvalRows | None = None
        self._pipeline: Pipeline | None = None
        self._closed = False

    def __iter__(self) -> Iterator[list[Any]]:
        """Steps without end: the trainer decides when to stop."""
        while True:
            yield self.next_step()

    def next_step(self) -> list[Any]:
        """This rank's micro-batches of the next optimizer step, prepared."""
        if self._closed:
            raise AssertionError("the data stream is closed")
        if self._pipeline is None:
            seq_len = self._reader.shape.seq_len
            pack = self._config.pack
            planner = RowPlanner(self._order, self._position, seq_len, pack=pack)
            num_workers, prefetch = self._config.num_workers, self._config.prefetch
            self._pipeline = Pipeline(planner, self._reader, num_workers=num_workers, prefetch=prefetch)
        step = self._pipeline.next_step()
        self._position, self._last_step = step.position, step
        self._steps += 1
        return step.batches

    def sources(self) -> list[SourceFacts]:
        """Every source of the mixture, and how far all ranks together have read it."""
        read = [progress.earlier + progress.tokens for progress in self._position.progress]
        for cursor in self._position.cursors:
            if cursor is not None:  # a document that was begun counts as far as it was read
                read[cursor.source] -= cursor.stop - cursor.offset
        rows = zip(self.stores, self._weights, read, self._order.tables, self._num_cut, strict=True)
        return [
            SourceFacts(
                store.name, store.num_documents, store.num_tokens, weight / sum(self._weights),
                num_read, num_read / max(table.num_training_tokens, 1), store.dropped, num_cut,
                store.without_loss,
            )
            for store, weight, num_read, table, num_cut in rows
        ]  # fmt: skip

    def figures(self) -> dict[str, dict[str, float]]:
        """For a log, by source: what changes while it is read, and its share."""
        return {
            source.name: {"tokens": source.tokens_read, "epochs": source.epochs, "weight": source.weight}
            for source in self.sources()
        }

    def consumed_documents(self) -> list[DocumentSpan]:
        """The pieces of documents in this rank's rows of the last step, in order."""
        if self._last_step is None:
            return []
        spans = (span for span in self._last_step.spans if span[0] != NO_SOURCE)
        return [DocumentSpan(self.stores[source].name, *rest) for source, *rest in spans]

    def eval_batches(self, num_batches: int) -> Iterator[Batch]:
        """This rank's micro-batches of the first `num_batches` global batches of the held-out slice.

        Always the same rows, whatever the step and the data-parallel size. Fewer where the slice is smaller;
        the last rows are then filled up with padding that carries no loss. Every rank gets equally many
        micro-batches.
        """
        shape = self._reader.shape
        if self._eval_rows is None:
            self._eval_rows = EvalRows(
                self._holdout.documents(),
                shape.seq_len,
                pack=self._config.pack,
                keeps_whole=[store.keeps_whole for store in self.stores],
            )
        require_holdout(self._holdout.fraction, self._eval_rows.num_rows)
        num_available = -(-self._eval_rows.num_rows // shape.global_batch_size)
        for number in range(min(num_batches, num_available)):
            first = number * shape.global_batch_size + shape.first_row
            yield from self._reader.read(self._eval_rows.read(first, first + shape.num_rows))

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step handed out: small, JSON-able, the same on every rank."""
        return saved.to_dict(self._position, self._describe(self._settings), self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Go on from a saved position, under whatever data-parallel size, batch and sequence length.

        Where the data set, its mixture or its order has changed, the saved position does not mean the same
        any more: that is a `ConfigError`, or, with `data.on_change = "continue"`, a message that is
        returned.
        """
        state = saved.current_version(state)
        settings = saved.saved_settings(state)
        asked = replace(
            self._settings,
            piece_len=self._config.piece_len or settings.piece_len,
            cursors=self._config.cursors or settings.cursors,
        )
        goes_on = self._config.on_change == "continue"
        message = saved.mismatch(state, self._describe(asked), goes_on=goes_on)
        if message is not None and not goes_on:
            raise ConfigError(message)
        if message is not None and self._reader.shape.dp_rank == 0:
            say(message.removeprefix("data: "))
        self._stop()
        # The saved settings win: under others, the rest of an epoch would repeat and skip documents.
        self._order = self._build_order(settings.piece_len, settings.seed, settings.shuffle)
        self._position = saved.from_dict(state, self._describe(settings), self._order)
        self._steps = int(state["steps"])
        self._last_step = None
        return message

    @property
    def fingerprint(self) -> str:
        """Names the data set and its order. Ranks that do not agree on it read different data."""
        return saved.fingerprint(self._describe(self._settings))

    def close(self) -> None:
        """Stop the background threads. Safe to call twice."""
        self._stop()
        self._closed = True

    def __enter__(self) -> DataStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
        self._pipeline = None

    @property
    def _settings(self) -> saved.OrderSettings:
        order = self._order
        return saved.OrderSettings(
            order.seed, order.shuffle, order.tables[0].piece_len, len(self._position.cursors)
        )

    def _describe(self, settings: saved.OrderSettings) -> saved.Description:
        names = tuple(store.name for store in self.stores)
        fingerprints = tuple(store.fingerprint for store in self.stores)
        return saved.Description(settings, self._config.holdout, names, fingerprints, self._weights)

    def _build_order(self, piece_len: int, seed: int, shuffle: bool) -> ChunkOrder:
        tables = [self._holdout.training_chunks(store, piece_len) for store in self.stores]
        if self._trains:
            self._holdout.require_training(tables)
        return ChunkOrder(tables, self._weights, seed=seed, shuffle=shuffle)

    def _default_cursors(self) -> int:
        """Enough for a batch to be varied, few enough that a small corpus is not read in several epochs at
        once."""
        num_chunks = sum(table.num_chunks for table in self._order.tables)
        return max(min(_MOST_CURSORS, num_chunks // 4), 1) if self._config.shuffle else 1


def _num_longer(store: TokenStore, seq_len: int) -> int:
    """Documents that should stay whole and do not fit a row."""
    if not store.keeps_whole:
        return 0
    return sum(int((store.lengths(block) > seq_len).sum()) for block in index_blocks(store))


def build_data(
    config: DataConfig,
    *,
    dp_rank: int,
    dp_size: int,
    micro_batch_size: int,
    global_batch_size: int,
    seed: int,
    prepare: Prepare | None = None,
    trains: bool = True,
) -> DataStream:
    """Open the data set of a section for one data-parallel rank.

    Ranks that share their tokens (context and tensor parallelism) pass the same `dp_rank` and read the same
    rows. The first process tokenises what is not in the cache yet; the others wait for it.
    `prepare` turns the micro-batches of a step into what `next_step` shall return, ahead of it, in the
    background. Without `trains`, all documents may be held out.
    """
    shape = Shape(
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        seq_len=config.seq_len,
    )
    stores, vocab_size = open_sources(config)
    return DataStream(stores, vocab_size, config, shape, seed, prepare, trains=trains)
