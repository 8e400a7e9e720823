"""Forward and backward of a micro-batch, as they are or as a graph that is replayed.

A graph is captured for each *kind* of micro-batch: its shape, whether the step's gradient is complete after
it, and the state that the engine was in before it (:mod:`fsdmoe.fsdp.host_state`). In a step of four
micro-batches there are three: the first overwrites gradients and gathers new weights, the next ones add to
what is there, the last one finishes the reduction.

::

    a kind is seen for the first time      run as it is: kernels are compiled, plans made, buffers allocated
    all kinds of a whole step are known    capture, then replay
    from then on                           replay

Nothing is captured while new kinds turn up: their first runs hold activations, which would need memory in
addition to those of the graphs. Beyond ``train.graph_shapes`` shapes, further ones run as they are.

Rows of packed documents may change their shape hours after the others were captured. Where the device has no
memory for such a micro-batch next to the graphs, these are dropped before it runs, and captured again in a
later step. The fourth time that micro-batches without a graph of their own need this, it is for good.

With the ``flex`` dispatcher (:mod:`fsdmoe.experts.dispatch.flex_state`) exchanges of rows are part of a
graph; what happens when rows do not fit is not. A step that is repeated runs as it is, and so does the one
behind it, in which the buffers of rows may become larger; graphs of the old ones are dropped then. All ranks
of an exchange know alike that this has happened.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.fsdp import Engine
from fsdmoe.fsdp.host_state import (
    HostState,
    buffers_of,
    close_capture,
    drop_gathered,
    open_capture,
    prepare_gradients,
    settle,
)
from fsdmoe.graphs.device_graph import Recorder, recorded
from fsdmoe.graphs.static_inputs import GivenBatch, ShapeKey, StaticInputs, shape_key
from fsdmoe.mesh import Axis
from fsdmoe.models.causal_lm import CausalLM, LossOutput, MicroBatches, StepCounts
from fsdmoe.precision.loss_scale import LossScaler

logger = logging.getLogger(__name__)

_GIB = 2**30
_MOST_KINDS = 8
"""Of one shape. More than the three or four of a step means that something else changes all the time."""
_MOST_DROPS = 4
"""For micro-batches that get no graph. Each costs a capture of all graphs."""


class _Kind(NamedTuple):
    """Micro-batches that one graph serves."""

    shape: ShapeKey
    first: bool
    last: bool
    before: HostState


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    after: HostState


@dataclass
class _Shape:
    """What all graphs of one shape share."""

    inputs: StaticInputs
    outputs: LossOutput | None = None
    """Outside of the pool; made with the first one that returns."""


class GraphedMicroBatches(MicroBatches):
    """Replays them where it can; see the module's text."""

    def __init__(
        self,
        model: CausalLM,
        engine: Engine,
        scaler: LossScaler,
        *,
        most_shapes: int,
        recorder: Recorder,
        flex: FlexState | None = None,
    ) -> None:
        super().__init__(model, engine, scaler)
        if scaler.enabled:
            raise AssertionError("graphs of a scaled loss, which fsdmoe.config.compatibility refuses")
        self._most_shapes, self._recorder, self._flex = most_shapes, recorder, flex
        self._shapes: dict[ShapeKey, _Shape] = {}
        self._seen: set[_Kind] = set()
        self._graphs: dict[_Kind, _Captured] = {}
        self._addresses: tuple[int, ...] = ()
        self._found_new, self._is_settled = True, False
        self._detours, self._is_detour = (0, 0), False
        self._told: set[str] = set()
        self._num_drops = 0
        self.num_replays = 0
        """Micro-batches that were replayed so far."""

    def run(
        self, inputs: dict[str, Any], counts: StepCounts, routing: RoutingContext, *, last: bool
    ) -> LossOutput:
        batch = GivenBatch(inputs, counts, routing)
        settle(self._engine)
        before = HostState.of(self._engine)
        if before.is_first:  # the start of a step
            drop_gathered(self._engine)
            before = HostState.of(self._engine)
            self._is_settled, self._found_new = not self._found_new, False
            self._follow_buffers()
            self._follow_exchanges()
        if self._is_detour or self._is_given_up:
            return self._beside_graphs(batch, last)
        shape = shape_key(batch)
        kind = None if shape is None else _Kind(shape, routing.prior_load_LE is None, last, before)
        if kind is None or not before.is_at_rest or not self._is_known(kind):
            return self._first_run(batch, kind, last)
        if kind not in self._graphs:
            if not self._is_settled:
                return self._beside_graphs(batch, last)
            self._capture(kind, batch)
        return self._replay(kind, batch)

    @property
    def num_graphs(self) -> int:
        """Kinds of micro-batches that are captured."""
        return len(self._graphs)

    def close(self) -> None:
        """Drop all graphs: a communicator that graphs still use cannot be destroyed."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._recorder.pool_bytes = 0

    # Inside

    @property
    def _is_given_up(self) -> bool:
        return self._num_drops >= _MOST_DROPS

    def _eager(self, batch: GivenBatch, last: bool) -> LossOutput:
        return super().run(*batch, last=last)

    def _beside_graphs(self, batch: GivenBatch, last: bool, *, gets_none: bool = False) -> LossOutput:
        """As it is; without graphs if it does not fit next to them. It needs about what they need for as many
        tokens. ``gets_none``: there will be no graph of it."""
        if self._graphs:
            tokens = math.prod(batch.inputs["tokens_BS"].shape)
            most_tokens = max(math.prod(kind.shape.tokens) for kind in self._graphs)
            if self._recorder.free_bytes() * most_tokens < self._recorder.pool_bytes * tokens:
                self._num_drops += gets_none
                self._is_settled = False
                self._tell_of_drop(tokens)
                self.close()
        return self._eager(batch, last)

    def _tell_of_drop(self, tokens: int) -> None:
        why = f"{tokens} tokens without a graph do not fit next to {self._recorder.pool_bytes / _GIB:.2f} GiB"
        if self._is_given_up:  # shown by every rank: all others wait for it from now on
            where = "" if self._engine.meshes.size(Axis.WORLD) == 1 else f" on rank {dist.get_rank()}"
            logger.error("graphs: dropped for good%s: for the %dth time %s", where, self._num_drops, why)
        else:
            logger.info("graphs: dropped, and captured again later: %s", why)

    def _is_known(self, kind: _Kind) -> bool:
        return kind in self._graphs or kind in self._seen

    def _first_run(self, batch: GivenBatch, kind: _Kind | None, last: bool) -> LossOutput:
        """Eagerly, from the inputs that a graph of it will read: kernels build here what they build for a
        shape, since no capture allows it. Whether it can be captured is found out."""
        if kind is None or not kind.before.is_at_rest or not self._may_capture(kind):
            return self._beside_graphs(batch, last, gets_none=kind is None or kind.before.is_at_rest)
        self._found_new = True
        if (shape := self._shapes.get(kind.shape)) is None:
            shape = self._shapes[kind.shape] = _Shape(StaticInputs(batch, kind.shape.num_borders))
        else:
            shape.inputs.fill(batch)
        random_before = self._recorder.random_state()
        out = self._beside_graphs(shape.inputs.given(first=kind.first), last)
        if self._recorder.random_state() != random_before:
            raise ConfigError(
                "train.graphs: expected a model that draws no random numbers in training, got one that does "
                "(dropout): recomputation inside of a graph would draw others; set its dropout to 0, or "
                'train.graphs = "none"'
            )
        self._seen.add(kind)
        if shape.outputs is None:
            shape.outputs = LossOutput(*(torch.empty_like(tensor) for tensor in _tensors(out)))
        return out

    def _may_capture(self, kind: _Kind) -> bool:
        if kind.shape not in self._shapes and len(self._shapes) >= self._most_shapes:
            self._tell(
                f"graphs: micro-batches of {kind.shape} run without a graph: {self._most_shapes} other "
                "shapes are captured already (train.graph_shapes)"
            )
            return False
        if sum(other.shape == kind.shape for other in self._seen) >= _MOST_KINDS:
            self._tell(
                f"graphs: some micro-batches of {kind.shape} run without a graph: the state of weights and "
                f"gradients before them was none of {_MOST_KINDS} that were seen before"
            )
            return False
        return True

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            logger.info("%s", line)

    def _follow_buffers(self) -> None:
        """Graphs hold addresses: those of buffers that were released and restored are others."""
        addresses = tuple(tensor.data_ptr() for tensor in buffers_of(self._engine))
        if self._flex is not None:  # buffers of rows move when they grow, and never else
            addresses += (self._flex.tokens, self._flex.num_ids)
        if addresses != self._addresses and self._graphs:
            self._tell("graphs: the model's buffers have moved; its micro-batches are captured again")
            self.close()
        self._addresses = addresses

    def _follow_exchanges(self) -> None:
        """Whether this step runs without graphs because rows of ``flex`` did not fit."""
        if (flex := self._flex) is not None:
            detours = flex.num_repeated, flex.num_rerouted
            self._is_detour = flex.is_repeating or detours != self._detours
            if not flex.is_repeating:
                self._detours = detours

    def _capture(self, kind: _Kind, batch: GivenBatch) -> None:
        shape, engine, began = self._shapes[kind.shape], self._engine, time.perf_counter()
        outputs = shape.outputs
        assert outputs is not None, "a kind of micro-batch is captured once it has run"
        shape.inputs.fill(batch)
        prepare_gradients(engine)

        def work() -> None:
            open_capture(engine)
            out = self._eager(shape.inputs.given(first=kind.first), kind.last)
            for place, result in zip(_tensors(outputs), _tensors(out), strict=True):
                place.copy_(result)
            close_capture(engine)

        graph = recorded(self._recorder, work, f"a micro-batch of {kind.shape}")
        after = HostState.of(engine)
        self._graphs[kind] = _Captured(graph, after)
        logger.info(
            "graphs: captured a micro-batch of %s (%s) in %.1f s; %d graphs share %.2f GiB",
            kind.shape, _position(kind), time.perf_counter() - began, len(self._graphs),
            self._recorder.pool_bytes / _GIB,
        )  # fmt: skip

    def _replay(self, kind: _Kind, batch: GivenBatch) -> LossOutput:
        captured, shape = self._graphs[kind], self._shapes[kind.shape]
        assert shape.outputs is not None
        # Other ranks would wait for rows that this one sends another way.
        assert self._flex is None or not self._flex.is_repeating, "a repeated step exchanges no rows by flex"
        shape.inputs.fill(batch)
        prepare_gradients(self._engine)
        captured.graph.replay()
        captured.after.restore(self._engine)
        self.num_replays += 1
        # The next replay overwrites them.
        return LossOutput(*(tensor.clone() for tensor in _tensors(shape.outputs)))


def _tensors(out: LossOutput) -> tuple[Tensor, ...]:
    return out.loss, out.cross_entropy, out.balance_loss, out.loads_LE


def _position(kind: _Kind) -> str:
    first, last = kind.first, kind.last
    return "the step's only one" if first and last else "first" if first else "last" if last else "in between"
