"""From a position to this rank's micro-batches, in the background.

    StepPlanner        which spans make up the next global batch, the same on every rank; cut to its rows
      -> Mapper        reads these rows, and only these (num_workers threads, in order)
        -> Prefetcher  keeps `prefetch` steps ready

The planner runs ahead, but every step carries the position behind it: the trainer saves that of the last
step it took.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchdata.nodes import BaseNode, ParallelMapper, Prefetcher

from fsdmoe.data.batch import Batch
from fsdmoe.data.config import check_batch
from fsdmoe.data.cursors import Position, RowPlanner
from fsdmoe.data.packing import pack_rows, split_rows
from fsdmoe.data.spans import Spans
from fsdmoe.data.store import TokenStore

Prepare = Callable[[list[Batch]], list[Any]]


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


class StepSpans(NamedTuple):
    """This rank's spans of a step, and the position behind the whole step."""

    spans: Spans
    position: Position


class Step(NamedTuple):
    """The spans of a step and their tokens."""

    batches: list[Any]
    spans: Spans
    position: Position


class StepPlanner(BaseNode[StepSpans]):
    """The endless list of steps after a position."""

    def __init__(self, planner: RowPlanner, shape: Shape) -> None:
        super().__init__()
        self._planner, self._shape = planner, shape

    def next(self) -> StepSpans:
        spans = self._planner.next_rows(self._shape.global_batch_size)
        return StepSpans(self._shape.own(spans), self._planner.position)

    def get_state(self) -> dict[str, Any]:
        # torchdata wants a state from every node; positions come with the steps instead.
        return {"position": "carried by the steps"}


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

    def read_step(self, planned: StepSpans) -> Step:
        batches = self.read(planned.spans)
        return Step(
            batches if self.prepare is None else self.prepare(batches), planned.spans, planned.position
        )


class Pipeline:
    """The nodes above, running. One that was not closed stops when it is collected or the interpreter
    ends."""

    def __init__(self, planner: RowPlanner, reader: RowReader, *, num_workers: int, prefetch: int) -> None:
        node: BaseNode[Step] = ParallelMapper(
            StepPlanner(planner, reader.shape),
            reader.read_step,
            num_workers=num_workers,
            method="thread",
            snapshot_frequency=0,
        )
        nodes = [node]
        if prefetch:
            node = Prefetcher(node, prefetch_factor=prefetch, snapshot_frequency=0)
            nodes.append(node)
        self._node = node
        self._finalizer = weakref.finalize(self, _stop, nodes)

    def next_step(self) -> Step:
        return next(self._node)

    def stop(self) -> None:
        """End the threads. Safe to call twice."""
        self._finalizer()


def _stop(nodes: list[BaseNode[Step]]) -> None:
    """End the threads of these nodes.

    torchdata stops them when they are collected, and has no public way to ask for it. Waiting for that is not
    enough: the traceback of an error that came through them keeps them alive.
    """
    for node in reversed(nodes):
        iterator: Any = node
        while (inner := getattr(iterator, "_it", None)) is not None:
            iterator = inner
        shutdown = getattr(iterator, "_shutdown", None)
        if shutdown is not None:
            shutdown()
            # torchdata would do it again when the iterator is collected: perhaps at the interpreter's end,
            # where the modules that it needs are gone.
            iterator._shutdown = _nothing
    nodes.clear()


def _nothing() -> None:
    pass
