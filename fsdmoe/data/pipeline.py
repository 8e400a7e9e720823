"""From a position to this rank's micro-batches, in the background.

    plan    which spans make up the next global batch, the same on every rank; cut to its rows (one thread)
    read    these rows, and only these (`num_workers` threads, or the one that plans)

`prefetch` steps are kept ready. Planning runs ahead, but every step carries the position behind it: the
trainer saves that of the last step it took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdmoe.data.batch import Batch
from fsdmoe.data.cursors import Position, RowPlanner
from fsdmoe.data.packing import pack_rows, split_rows
from fsdmoe.data.spans import Spans
from fsdmoe.data.store import TokenStore
from fsdmoe.errors import ConfigError, refuse
from fsdmoe.rules import at_least

Prepare = Callable[[list[Batch]], list[Any]]


def check_batch(global_batch_size: int, micro_batch_size: int, *, dp_size: int) -> None:
    """Refuse a global batch that cannot be dealt evenly to the ranks that read different rows."""
    sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    refuse(at_least("train", sizes, dict.fromkeys(sizes, 1)))
    if global_batch_size % (dp_size * micro_batch_size):
        share, rest = divmod(global_batch_size, dp_size)
        raise ConfigError(
            f"train.global_batch_size: {global_batch_size} sequences cannot be divided over {dp_size} "
            f"data-parallel ranks in micro-batches of {micro_batch_size}; choose a multiple of "
            f"{dp_size * micro_batch_size}"
            + (f", or a divisor of {share} for train.micro_batch_size" if not rest else "")
        )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the global batch is cut: into rows, among ranks, into micro-batches."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    global_batch_size: int
    seq_len: int

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise AssertionError(f"expected a data-parallel rank below {self.dp_size}, got {self.dp_rank}")
        check_batch(self.global_batch_size, self.micro_batch_size, dp_size=self.dp_size)

    @property
    def num_rows(self) -> int:
        """This rank's rows of a global batch."""
        return self.global_batch_size // self.dp_size

    @property
    def first_row(self) -> int:
        """Where they begin: rank r has the r-th of `dp_size` equal blocks."""
        return self.dp_rank * self.num_rows

    def own(self, spans: Spans) -> Spans:
        """This rank's part of the spans of a global batch."""
        return spans.crop(self.first_row * self.seq_len, (self.first_row + self.num_rows) * self.seq_len)


class Step(NamedTuple):
    """This rank's micro-batches of a step, their spans, and the position behind the whole step."""

    batches: list[Any]
    spans: Spans
    position: Position


@dataclass(frozen=True)
class RowReader:
    """Spans to micro-batches."""

    stores: tuple[TokenStore, ...]
    shape: Shape
    pin_memory: bool
    """Page-locked, for copies to a GPU, which must be there."""
    prepare: Prepare | None = None
    """What is done with a step's micro-batches before they are handed out."""

    def read(self, spans: Spans) -> list[Batch]:
        batch = pack_rows(spans, self.stores, self.shape.seq_len, self.shape.num_rows)
        if self.pin_memory:
            batch = batch.pin_memory()
        return split_rows(batch, self.shape.micro_batch_size)


class Pipeline:
    """The steps after a position, prepared ahead. One that was not closed stops when it is collected or the
    interpreter ends."""

    def __init__(self, planner: RowPlanner, reader: RowReader, *, num_workers: int, prefetch: int) -> None:
        self._planner = planner
        self._reader = reader
        self._num_ahead = max(num_workers, prefetch)
        self._planning = ThreadPoolExecutor(1)  # so that plans are made in order
        self._reading = ThreadPoolExecutor(num_workers) if num_workers else self._planning
        self._ahead: deque[Future[Step]] = deque()

    def next_step(self) -> Step:
        while len(self._ahead) <= self._num_ahead:
            planned = self._planning.submit(_plan, self._planner, self._reader.shape)
            self._ahead.append(self._reading.submit(_read, self._reader, planned))
        return self._ahead.popleft().result()

    def stop(self) -> None:
        """End the threads. Safe to call twice."""
        self._planning.shutdown(cancel_futures=True)
        self._reading.shutdown(cancel_futures=True)


# Neither holds the pipeline: threads would keep it alive, and it them.
def _plan(planner: RowPlanner, shape: Shape) -> tuple[Spans, Position]:
    spans = planner.next_rows(shape.global_batch_size)
    return shape.own(spans), planner.position


def _read(reader: RowReader, planned: Future[tuple[Spans, Position]]) -> Step:
    spans, position = planned.result()
    batches = reader.read(spans)
    return Step(batches if reader.prepare is None else reader.prepare(batches), spans, position)
