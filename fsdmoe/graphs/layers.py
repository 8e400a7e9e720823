"""Micro-batches whose layers replay their attention sides (:mod:`fsdmoe.graphs.attention_side`).

For what a whole micro-batch cannot be captured with: dispatchers that count rows on the host, experts in
shapes that no grouped kernel takes. The first two steps run as they are, and so does the first micro-batch of
each kind, to compile kernels and to make buffers; then layers capture their forwards and backwards as they
come.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from fsdmoe.experts.context import RoutingContext
from fsdmoe.fsdp import Engine
from fsdmoe.graphs.attention_side import AttentionSide, Shared
from fsdmoe.graphs.device_graph import Recorder
from fsdmoe.graphs.static_inputs import GivenBatch, ShapeKey, StaticInputs, shape_key
from fsdmoe.models.causal_lm import CausalLM, LossOutput, MicroBatches, StepCounts
from fsdmoe.models.decoder import DecoderLayer
from fsdmoe.precision.loss_scale import LossScaler

logger = logging.getLogger(__name__)

_GIB = 2**30
_STEPS_BEFORE = 2


class LayeredMicroBatches(MicroBatches):
    """See the module's text."""

    def __init__(
        self,
        model: nn.Module,
        causal_lm: CausalLM,
        engine: Engine,
        scaler: LossScaler,
        *,
        most_shapes: int,
        recorder: Recorder,
    ) -> None:
        super().__init__(causal_lm, engine, scaler)
        self._layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
        if not self._layers:
            raise AssertionError("a model without decoder layers, which fsdmoe.config.compatibility refuses")
        self._most_shapes, self._recorder = most_shapes, recorder
        self._shapes: dict[ShapeKey, tuple[StaticInputs, Shared]] = {}
        self._sides = [AttentionSide(layer, index, recorder) for index, layer in enumerate(self._layers)]
        for layer, side in zip(self._layers, self._sides, strict=True):
            layer.attend = side  # type: ignore[method-assign]
        self._seen: set[tuple[ShapeKey | None, bool]] = set()
        self._num_steps = self._num_told = 0
        self._told: set[str] = set()

    def run(
        self, inputs: dict[str, Any], counts: StepCounts, routing: RoutingContext, *, last: bool
    ) -> LossOutput:
        batch = GivenBatch(inputs, counts, routing)
        shape = shape_key(batch)
        kind = shape, routing.prior_load_LE is None  # gradients of a step's first are not added to any
        is_ready = kind in self._seen and self._num_steps >= _STEPS_BEFORE
        self._seen.add(kind)
        self._num_steps += last
        if shape is None or not self._may_capture(shape, batch):
            return super().run(*batch, last=last)
        static, shared = self._shapes[shape]
        static.fill(batch)
        if not is_ready:  # kernels that build something for a shape build it here, which no capture allows
            return super().run(static.arguments(), counts, routing, last=last)
        for side in self._sides:
            side.use(shape, shared)
        try:
            out = super().run(static.arguments(), counts, routing, last=last)
        finally:
            shared.end()
            for side in self._sides:  # layers that did not run: a forward outside is no micro-batch
                side.use(None, None)
        self._tell_captured()
        return out

    @property
    def num_replays(self) -> int:
        """Attention sides that were replayed so far."""
        return sum(side.num_replays for side in self._sides)

    @property
    def num_graphs(self) -> int:
        return sum(side.num_graphs for side in self._sides)

    def close(self) -> None:
        """Drop all graphs, and leave the layers as they were."""
        for layer, side in zip(self._layers, self._sides, strict=True):
            side.drop()
            vars(layer).pop("attend", None)
        self._shapes.clear()
        self._recorder.pool_bytes = 0

    # Inside

    def _may_capture(self, shape: ShapeKey, batch: GivenBatch) -> bool:
        if shape in self._shapes:
            return True
        if len(self._shapes) >= self._most_shapes:
            line = (
                f"graphs: micro-batches of {shape} run without a graph: {self._most_shapes} other shapes are "
                "captured already (train.graph_shapes)"
            )
            if line not in self._told:
                self._told.add(line)
                logger.info("%s", line)
            return False
        self._shapes[shape] = StaticInputs(batch, shape.num_borders), Shared()
        return True

    def _tell_captured(self) -> None:
        if (found := self.num_graphs) != self._num_told:
            self._num_told = found
            logger.info(
                "graphs: %d of the attention of %d layers share %.2f GiB", found, len(self._sides),
                self._recorder.pool_bytes / _GIB,
            )  # fmt: skip
