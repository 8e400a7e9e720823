"""How the benchmarks beside this file take times: on the host's clock, or on the GPU's for short work."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
Run = Callable[[], object]


def child_environment() -> dict[str, str]:
    """Of a process that takes fsdmoe from this tree and everything else from where this one takes it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def require_gpu(otherwise: str = "") -> None:
    """End with one line where there is none; ``otherwise``: what can be run there."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name}: needs a GPU{f'; {otherwise}' if otherwise else ''}")


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
    """GPU milliseconds a call of every contender, once a round.

    What runs before leaves the card warm or cool, near its power limit or far from it. So each contender runs
    for a third of its time before it is timed, and the order changes so that each follows every other.
    """
    repeats: dict[str, int] = {}
    for name, run in runs.items():
        repeats[name] = max(3, round(seconds * 1e3 / gpu_milliseconds(run, 3)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for order in changing_orders(list(runs), rounds):
        for name in order:
            for _ in range(repeats[name] // 3):
                runs[name]()
            times[name].append(gpu_milliseconds(runs[name], repeats[name]))
    return times


def changing_orders(names: list[str], rounds: int) -> list[list[str]]:
    """Orders of which as many rounds as there are names have each directly behind every other once (where
    their number is odd: twice as many rounds, twice)."""
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2, ...
    return [
        [names[(turn + i) % n] for i in (zigzag if turn // n % 2 == 0 else reversed(zigzag))]
        for turn in range(rounds)
    ]


def take_turns(runs: dict[str, Run], seconds: float, rounds: int) -> dict[str, list[float]]:
    """GPU milliseconds of single calls, which take turns: what the card's clock does, it does to all of them.

    Differences of a percent show, which :func:`alternate` loses in what a clock changes within a second; the
    times themselves are those of a mixture.
    """
    total = sum(gpu_milliseconds(run, 3) for run in runs.values())
    repeats = max(3, round(seconds * 1e3 * len(runs) / total))
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for order in changing_orders(list(runs), rounds * repeats):
        for name in order:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            runs[name]()
            pair[1].record()
            marks[name].append(pair)
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in marks.items()}


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
