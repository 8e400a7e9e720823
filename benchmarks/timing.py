"""How the benchmarks beside this file take times: on the host's clock, or on the GPU's for short work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Run = Callable[[], object]


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Run, repeats: int, device: torch.device) -> float:
    """A call on the host's clock, over ``repeats`` calls without waiting between them."""
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return (time.perf_counter() - began) / repeats * 1e3


def gpu_milliseconds(run: Run, repeats: int) -> float:
    """A call on the GPU's clock, over ``repeats`` calls in a row after one that warms up."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def alternate(runs: dict[str, Run], seconds: float, rounds: int) -> dict[str, list[float]]:
    """GPU milliseconds a call of every contender, once a round, the order turned round each time."""
    repeats: dict[str, int] = {}
    for name, run in runs.items():
        repeats[name] = max(3, round(seconds * 1e3 / gpu_milliseconds(run, 3)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        order = list(runs) if turn % 2 == 0 else list(reversed(runs))
        for name in order:
            times[name].append(gpu_milliseconds(runs[name], repeats[name]))
    return times


def graph_of(run: Run) -> Run:
    """The same work as one replayed graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> object:
        graph.replay()
        return kept

    return replay
