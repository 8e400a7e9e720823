"""CUDA graphs without CUDA: what is recorded is computed again, and everything that the host noted meanwhile
is taken back, as if only the device had worked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdmoe.config import Config
from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.fsdp.host_state import buffers_of
from fsdmoe.fsdp.sharded_tensor import plain_attributes
from fsdmoe.graphs import GraphedMicroBatches
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import flex_state_of
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config


class _Done:
    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def unsent_collectives() -> Iterator[None]:
    """What is captured is not sent: other ranks may be elsewhere."""
    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
             "all_to_all_single", "all_reduce")  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(dist, name):
                done = lambda *_, async_op=False, **__: _Done() if async_op else None  # noqa: E731
                stack.enter_context(mock.patch.object(dist, name, done))
        yield


class HostNotes:
    """All that the engine keeps beside the contents of its buffers. No gradient is held: the engine would
    take that for a user's reference to it."""

    def __init__(self, engine: Engine) -> None:
        self._owners: list[Any] = []
        for unit in engine.units:
            self._owners += [unit, unit.grads, unit.grads.guard]
            self._owners += [slot for slot in (unit.slot, unit.grads.slot) if slot is not None]
        self._values = [dict(vars(owner)) for owner in self._owners]
        self._params = [grad for unit in engine.units for grad in unit.grads.param_grads]
        self._written = [(grad.written, grad.is_present) for grad in self._params]

    def put_back(self) -> None:
        for owner, values in zip(self._owners, self._values, strict=True):
            vars(owner).clear()
            vars(owner).update(values)
        for param, (written, was_shown) in zip(self._params, self._written, strict=True):
            param.written = written
            with plain_attributes():
                param.show() if was_shown else param.hide()


class EchoGraph:
    def __init__(
        self, engine: Engine, work: Callable[[], None], before: HostNotes, flex: FlexState | None
    ) -> None:
        self._engine, self._work, self._flex = engine, work, flex
        self._before: HostNotes | None = before
        self._bounds = _bounds(flex)

    def replay(self) -> None:
        notes = HostNotes(self._engine)
        if self._before is not None:  # behind its capture: the host has noted already what is computed now
            self._before.put_back()
            self._before = None
        assert _bounds(self._flex) == self._bounds, "rows would be written to where buffers were"
        self._work()
        notes.put_back()

    def reset(self) -> None:
        pass


def _bounds(flex: FlexState | None) -> tuple[int, int] | None:
    return None if flex is None else (flex.tokens, flex.num_ids)


class EchoRecorder:
    """``fsdmoe.graphs.device_graph.Recorder`` on any device."""

    pool_bytes = 0
    free = 0
    """Bytes of the device."""

    def free_bytes(self) -> int:
        return self.free

    def __init__(self, engine: Engine, flex: FlexState | None = None) -> None:
        """With ``flex`` all ranks have to record at the same time: what they send decides over sizes."""
        self._engine, self._flex = engine, flex

    def record(self, work: Callable[[], None]) -> EchoGraph:
        buffers = buffers_of(self._engine)
        contents, notes = [buffer.clone() for buffer in buffers], HostNotes(self._engine)
        with unsent_collectives() if self._flex is None else contextlib.nullcontext():
            work()
        for buffer, content in zip(buffers, contents, strict=True):
            buffer.data.copy_(content)
        return EchoGraph(self._engine, work, notes, self._flex)

    def random_state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()


def train_with_echoes(output_dir: str, most_shapes: int, overrides: dict[str, Any]) -> dict[str, int]:
    """A tiny run on this rank whose micro-batches are replayed; 0 shapes: a plain run."""
    return run_with_echoes(tiny_config(output_dir, dist.get_world_size(), **overrides), most_shapes)


def run_with_echoes(config: Config, most_shapes: int) -> dict[str, int]:
    """The same of any configuration."""
    run = Run(config, build_meshes(config.mesh))
    found = {"replays": 0, "graphs": 0, "repeated": 0, "repeated replays": 0}
    if not most_shapes:
        run.close(run.loop([]))
        return found
    engine, flex = engine_of(run.model), flex_state_of(run.model)
    graphed = GraphedMicroBatches(
        run.decoder, engine, run.scaler, most_shapes=most_shapes,
        recorder=EchoRecorder(engine, flex), flex=flex,
    )  # fmt: skip
    run.micro_batches = graphed
    if flex is not None:
        must_repeat, counted = flex.must_repeat, 0

        def watched(is_finite: bool) -> bool:
            nonlocal counted
            replayed, counted = graphed.num_replays - counted, graphed.num_replays
            repeats = must_repeat(is_finite)
            found["repeated"] += repeats
            found["repeated replays"] += repeats and replayed > 0
            return repeats

        flex.must_repeat = watched  # type: ignore[method-assign]
    status = run.loop([])
    found |= {"replays": graphed.num_replays, "graphs": graphed.num_graphs}
    run.close(status)
    return found
