"""Graphs of attention sides without CUDA: what is recorded is computed, and computed again by every replay
but the first, with the notes on gradients that it was recorded with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.graphs import LayeredMicroBatches
from fsdmoe.mesh import build_meshes
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config


class _Echo:
    def __init__(self, engine: Engine, work: Callable[[], None]) -> None:
        self._grads = [grad for unit in engine.units for grad in unit.grads.param_grads]
        self._before, self._work, self._is_new = self._written(), work, True
        work()

    def replay(self) -> None:
        if self._is_new:
            self._is_new = False
            return
        now = self._written()
        self._note(self._before)
        self._work()
        self._note(now)

    def reset(self) -> None:
        pass

    def _written(self) -> list[bool]:
        return [grad.written for grad in self._grads]

    def _note(self, written: list[bool]) -> None:
        for grad, was_written in zip(self._grads, written, strict=True):
            grad.written = was_written


class LayerEchoes:
    """``fsdmoe.graphs.device_graph.Recorder`` on any device, for layers."""

    pool_bytes = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def record(self, work: Callable[[], None]) -> _Echo:
        return _Echo(self._engine, work)

    def random_state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()


def train_with_layer_echoes(
    output_dir: str, most_shapes: int, overrides: dict[str, Any]
) -> tuple[int, int, bool]:
    """A tiny run on this rank; how many sides were replayed, how many graphs there were, and whether layers
    are as before once it has closed."""
    config = tiny_config(output_dir, dist.get_world_size(), **overrides)
    run = Run(config, build_meshes(config.mesh))
    engine = engine_of(run.model)
    runner = LayeredMicroBatches(
        run.model, run.decoder, engine, run.scaler, most_shapes=most_shapes, recorder=LayerEchoes(engine)
    )
    run.micro_batches = runner
    status = run.loop([])
    found = runner.num_replays, runner.num_graphs
    run.close(status)
    return *found, all("attend" not in vars(layer) for layer in runner._layers)
